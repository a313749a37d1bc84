"""Nodes that differ in block size and KV dtype, as real processes behind a gateway."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pdserve import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_PROMPTS = tuple(
    [5 + (start + 7 * index) % 150 for index in range(length)] for start, length in enumerate((1, 33, 100))
)
_MAX_TOKENS = 8


async def _ask(url: str, prompt: list[int]) -> list[int]:
    body = {"model": "test", "prompt": prompt, "max_tokens": _MAX_TOKENS, "temperature": 0}
    async with aiohttp.ClientSession() as session:
        options = {"return_token_ids": True, "ignore_eos": True}
        async with session.post(f"{url}/v1/completions", json=body | options) as reply:
            assert reply.status == 200, await reply.text()
            token_ids: list[int] = (await reply.json())["choices"][0]["token_ids"]
            return token_ids


def _alone(model_dir: Path, **options: Any) -> list[list[int]]:
    llm = LLM(model_dir, num_blocks=100, **options)
    sampling = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([list(prompt) for prompt in _PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _cluster(start_cluster: Any, model_dir: Path, prefill: tuple[str, ...], decode: tuple[str, ...]) -> Any:
    cluster = start_cluster(model_dir, 0, 1, ("--num-blocks", "100", *decode))
    cluster.start_node("prefill", 0, *prefill)
    cluster.wait_for_nodes(2)
    return cluster


def _routes(cluster: Any) -> dict[str, int]:
    routes: dict[str, int] = cluster.status()["routes"]
    return routes


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
async def test_other_block_sizes_change_no_token(start_cluster: Any, tiny_model: Any, kv_dtype: str) -> None:
    model_dir = tiny_model()
    dtype = ("--kv-cache-dtype", kv_dtype)
    cluster = _cluster(start_cluster, model_dir, ("--block-size", "16", *dtype), ("--block-size", "32", *dtype))

    answers = [await _ask(cluster.url, list(prompt)) for prompt in _PROMPTS]

    assert answers == _alone(model_dir, kv_cache_dtype=kv_dtype)
    assert _routes(cluster) == {"disaggregated": len(_PROMPTS), "local": 0, "migrated": 0}
    cluster.wait_idle()


async def test_a_float32_prompt_is_decoded_from_an_int8_cache_of_other_blocks(
    start_cluster: Any, tiny_model: Any
) -> None:
    """The first token comes from keys and values that were not rounded, as float32 has it; the second from those of the
    prompt, rounded once, and so on: what a node that is int8 throughout says may differ where two logits are close."""
    model_dir = tiny_model()
    cluster = _cluster(
        start_cluster, model_dir, ("--block-size", "16"), ("--block-size", "32", "--kv-cache-dtype", "int8")
    )

    answers = [await _ask(cluster.url, list(prompt)) for prompt in _PROMPTS]

    in_float32, in_int8 = _alone(model_dir), _alone(model_dir, kv_cache_dtype="int8")
    assert [answer[0] for answer in answers] == [alone[0] for alone in in_float32]
    agreeing = [
        max(_num_equal(answer, alone) for alone in both)
        for answer, both in zip(answers, zip(in_float32, in_int8, strict=True), strict=True)
    ]
    assert sum(agreeing) >= len(_PROMPTS) * _MAX_TOKENS * 3 // 4
    assert _routes(cluster) == {"disaggregated": len(_PROMPTS), "local": 0, "migrated": 0}
    cluster.wait_idle()


def _num_equal(some: list[int], others: list[int]) -> int:
    """How many tokens agree before the first that does not."""
    pairs = enumerate(zip(some, others, strict=True))
    return next((index for index, (one, other) in pairs if one != other), len(some))
