"""The stream law: join(stream deltas) == non-stream text; same finish_reason, usage and logprobs."""

from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_CASES: list[dict[str, Any]] = [
    {"max_tokens": 1, "temperature": 0},
    {"max_tokens": 2, "temperature": 0},
    {"max_tokens": 17, "temperature": 0},
    {"max_tokens": 30, "temperature": 1.2, "seed": 5},
    {"max_tokens": 30, "temperature": 1.5, "seed": 6, "top_p": 0.9},
    {"max_tokens": 40, "temperature": 0, "stop": [" the", ","]},
    {"max_tokens": 40, "temperature": 1.0, "seed": 8, "stop": "."},
    {"max_tokens": 12, "temperature": 0.8, "seed": 9, "logprobs": 2},
    {"max_tokens": 12, "temperature": 0, "logprobs": 1, "stop": [" a"]},
    {"max_tokens": 8, "temperature": 1.0, "seed": 10, "n": 2},
]


@pytest.fixture
def client(disaggregated: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=disaggregated.url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_completions(client: openai.OpenAI, case: dict[str, Any]) -> None:
    """C011, C013, C014."""
    prompt = "Once upon a time, in a small village by the sea, there lived"

    whole = client.completions.create(model="test", prompt=prompt, **case)
    chunks = list(
        client.completions.create(
            model="test", prompt=prompt, stream=True, stream_options={"include_usage": True}, **case
        )
    )

    for choice in whole.choices:
        own = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in own) == choice.text
        assert [part.finish_reason for part in own if part.finish_reason] == [choice.finish_reason]
        if choice.logprobs is not None:
            joined = [value for part in own if part.logprobs for value in part.logprobs.token_logprobs or []]
            assert joined == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    assert chunks[-1].choices == []
    _assert_same_usage(chunks[-1].usage, whole.usage)


@pytest.mark.parametrize("case", [case for case in _CASES if "logprobs" not in case], ids=str)
def test_chat(client: openai.OpenAI, case: dict[str, Any]) -> None:
    """C011, C012."""
    messages: Any = [{"role": "user", "content": "Tell me about the sea, with an emoji 🌊 in it."}]

    whole = client.chat.completions.create(model="test", messages=messages, **case)
    chunks = list(
        client.chat.completions.create(
            model="test", messages=messages, stream=True, stream_options={"include_usage": True}, **case
        )
    )

    for choice in whole.choices:
        own = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.delta.content or "" for part in own) == choice.message.content
        assert [part.finish_reason for part in own if part.finish_reason] == [choice.finish_reason]
    _assert_same_usage(chunks[-1].usage, whole.usage)


def _assert_same_usage(streamed: Any, whole: Any) -> None:
    """All but `cached_tokens`, which tells truly that the second request found the first one's blocks."""
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(streamed, name) == getattr(whole, name)
