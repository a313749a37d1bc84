"""The split law: disaggregated == colocated == offline `LLM` == transformers in float32, token by token."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_BLOCK_SIZE = 16
_MAX_TOKENS = 12
_SENTENCES = (
    "The capital of France is Paris, a city on the river Seine that has been a centre of trade for two thousand years.",
    "Water boils at one hundred degrees at sea level, and at a lower temperature on top of a high mountain.",
    "Once upon a time there was a small robot who wanted to learn how to paint the sea in the evening light.",
    "In mathematics a group is a set with an operation that is associative and has an identity and inverses.",
)
_SEED = 1234


def _prompts(tokenizer: Any) -> list[list[int]]:
    """1 token; around one block; several chunks; shared prefixes."""
    texts = [tokenizer.encode(" ".join(_SENTENCES[i:] + _SENTENCES[:i]) * 12) for i in range(4)]
    lengths = (1, 2, _BLOCK_SIZE - 1, _BLOCK_SIZE, _BLOCK_SIZE + 1, 31, 32, 33, 100)
    prompts = [text[:length] for text in texts for length in lengths]
    prompts += [text[:700] for text in texts[:2]]  # more than one chunk of the token budget
    shared = texts[3][:64]
    return prompts + [shared + texts[i][i : i + 5 + i] for i in range(4)]


Completions = list[list[int]]


async def _ask(url: str, prompts: list[list[int]], concurrency: int, top_k: int = 0, **options: Any) -> Completions:
    limit = asyncio.Semaphore(concurrency)
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300) as client:

        async def one(prompt: list[int]) -> list[int]:
            async with limit:
                reply = await client.completions.create(
                    model="test",
                    prompt=prompt,
                    max_tokens=_MAX_TOKENS,
                    extra_body={"return_token_ids": True, "ignore_eos": True, "top_k": top_k},
                    **options,
                )
            token_ids: list[int] = reply.choices[0].model_extra["token_ids"]  # type: ignore[index]
            return token_ids

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def _transformers_greedy(model_dir: Path, prompts: list[list[int]]) -> Completions:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    completions = []
    for prompt in prompts:
        generated = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=_MAX_TOKENS,
            min_new_tokens=_MAX_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        completions.append(generated[0, len(prompt) :].tolist())
    return completions


def _offline(llm: LLM, prompts: list[list[int]], **sampling: Any) -> Completions:
    params = SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True, **sampling)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


async def test_real_model_greedy(disaggregated: Any, colocated: Any, demo_model_dir: Path) -> None:
    llm = LLM(demo_model_dir, num_blocks=400)
    prompts = _prompts(llm.tokenizer)
    assert len(prompts) >= 40
    before = disaggregated.status()["routes"]["disaggregated"]

    expected = _transformers_greedy(demo_model_dir, prompts)

    assert _offline(llm, prompts, temperature=0.0) == expected
    assert await _ask(colocated.url, prompts, 4, temperature=0) == expected
    assert await _ask(disaggregated.url, prompts, 4, temperature=0) == expected
    assert disaggregated.status()["routes"]["disaggregated"] == before + len(prompts)
    assert await _ask(disaggregated.url, prompts, 4, temperature=0) == expected, "warm caches on both sides"


async def test_real_model_seeded(disaggregated: Any, colocated: Any, demo_model_dir: Path) -> None:
    llm = LLM(demo_model_dir, num_blocks=400)
    prompts = _prompts(llm.tokenizer)
    options = {"temperature": 0.9, "top_p": 0.95, "seed": _SEED}

    expected = _offline(llm, prompts, **options)

    assert await _ask(colocated.url, prompts, 4, **options) == expected
    assert await _ask(disaggregated.url, prompts, 4, **options) == expected


@pytest.mark.parametrize(
    "overrides",
    [
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
        {"hidden_size": 80, "num_attention_heads": 2, "num_key_value_heads": 1},
        {"num_key_value_heads": 1},
    ],
    ids=["three kv heads of nine", "head_dim 40", "one kv head"],
)
async def test_tiny_models(start_cluster: Any, tiny_model: Any, overrides: dict[str, Any]) -> None:
    model_dir = tiny_model(**overrides)
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 15, 16, 17, 33, 200)
    prompts = [torch.randint(3, 199, (length,), generator=generator).tolist() for length in lengths]
    cluster = start_cluster(model_dir, node_options=("--num-blocks", "100", "--max-num-batched-tokens", "48"))
    llm = LLM(model_dir, num_blocks=100)
    seeded = {"temperature": 1.1, "top_k": 40, "seed": _SEED}

    expected = _transformers_greedy(model_dir, prompts)

    assert _offline(llm, prompts, temperature=0.0) == expected
    assert await _ask(cluster.url, prompts, 3, temperature=0) == expected
    assert await _ask(cluster.url, prompts, 3, **seeded) == _offline(llm, prompts, **seeded)
    penalized = {**seeded, "presence_penalty": 0.8, "frequency_penalty": 0.5}
    offline = _offline(llm, prompts, **penalized, logit_bias={7: -100, 9: 4.0})
    assert await _ask(cluster.url, prompts, 3, **penalized, logit_bias={"7": -100, "9": 4.0}) == offline
    assert offline != _offline(llm, prompts, **seeded), "penalties and biases change something"
    await _check_prompt_logprobs(cluster.url, model_dir, prompts[-1])


async def _check_prompt_logprobs(url: str, model_dir: Path, prompt: list[int]) -> None:
    """C076, C078: those of transformers shifted by one, cold and warm, through both nodes."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(1)
    expected = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300) as client:
        for max_tokens in (0, 2, 0):
            reply = await client.completions.create(
                model="test", prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
            )
            scored = reply.choices[0].logprobs
            assert scored is not None and scored.token_logprobs is not None
            assert scored.token_logprobs[0] is None
            assert scored.token_logprobs[1 : len(prompt)] == pytest.approx(expected, abs=1e-3)
