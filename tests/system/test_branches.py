"""n and best_of through real processes: one prefill and one transfer, and each choice as if it were alone."""

from typing import Any

import openai
import pytest

from pdserve import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_PROMPT = [3 + index * 7 % 190 for index in range(70)]
_OPTIONS: dict[str, Any] = {"temperature": 1.1, "seed": 77}


async def _choices(url: str, **options: Any) -> tuple[list[list[int]], Any]:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300) as client:
        reply = await client.completions.create(
            model="test",
            prompt=_PROMPT,
            max_tokens=12,
            extra_body={"return_token_ids": True, "ignore_eos": True},
            **_OPTIONS,
            **options,
        )
    return [choice.model_extra["token_ids"] for choice in reply.choices], reply.usage


def _offered(cluster: Any) -> int:
    """Blocks of finished offers, those that the other end had already included; a canary's prompt is one block."""
    counts = [node["transfer"] for node in cluster.status()["nodes"]]
    return sum(count["blocks_sent"] + count["blocks_skipped"] for count in counts)


async def test_choices_of_a_prompt_travel_once_and_equal_the_offline_ones(start_cluster: Any, tiny_model: Any) -> None:
    model_dir = tiny_model()
    cluster = start_cluster(model_dir, node_options=("--num-blocks", "100", "--block-size", "16"))
    llm = LLM(model_dir, num_blocks=100)

    def offline(**options: Any) -> list[list[int]]:
        params = SamplingParams(max_tokens=12, ignore_eos=True, **_OPTIONS, **options)
        (output,) = llm.generate([_PROMPT], params, use_tqdm=False)
        return [list(completion.token_ids) for completion in output.outputs]

    before = _offered(cluster)

    choices, usage = await _choices(cluster.url, n=4)

    assert choices == offline(n=4)
    cluster.wait_until(lambda: _offered(cluster) >= before + 5, "the prompt's five blocks were sent")
    assert _offered(cluster) < before + 10, "they were sent once"
    assert (usage.prompt_tokens, usage.completion_tokens) == (70, 48)
    assert usage.prompt_tokens_details.cached_tokens == 0

    best, usage = await _choices(cluster.url, n=2, best_of=4)

    assert best == offline(n=2, best_of=4) and all(choice in choices for choice in best)
    assert usage.completion_tokens == 48
    cluster.wait_idle()
