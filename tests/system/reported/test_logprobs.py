"""What users of other servers reported of logprobs, through a prefill and a decode node."""

from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = {"model": "test", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
COMPLETION = {"model": "test", "prompt": "One, two, three,", "temperature": 0}


def test_what_cannot_be_sampled_is_still_strict_json(api: Any) -> None:
    """C068: candidates that top_k or a grammar has masked."""
    for fields in ({"top_k": 1}, {"guided_choice": ["yes"]}):
        body = {**COMPLETION, **fields, "logprobs": 5, "max_tokens": 3, "temperature": 1}
        choice = api.ask(COMPLETIONS, body)["choices"][0]
        assert len(choice["logprobs"]["top_logprobs"][0]) >= 5
        api.stream(COMPLETIONS, body)


def test_logprobs_of_an_answer_belong_to_its_tokens(api: Any) -> None:
    """C069, C071, C072, C073, C075, C081: at every position, in both shapes, streamed and not."""
    body = {**COMPLETION, "max_tokens": 5, "logprobs": 3}
    whole = api.ask(COMPLETIONS, body)["choices"][0]["logprobs"]
    for token, logprob, top in zip(whole["tokens"], whole["token_logprobs"], whole["top_logprobs"], strict=True):
        assert top[token] == logprob == max(top.values()) and len(top) == 3
        assert list(top.values()) == sorted(top.values(), reverse=True)
    assert len(set(map(str, whole["top_logprobs"]))) > 1
    parts = [event["choices"][0]["logprobs"] for event in api.stream(COMPLETIONS, body)]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [top for part in parts for top in part["top_logprobs"]] == whole["top_logprobs"]

    hot = {**COMPLETION, "max_tokens": 8, "logprobs": 1, "temperature": 2, "seed": 1}
    shown = api.ask(COMPLETIONS, hot)["choices"][0]["logprobs"]
    assert all(token in top for token, top in zip(shown["tokens"], shown["top_logprobs"], strict=True))
    none = api.ask(CHATS, {**CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": 0})["choices"][0]
    assert [entry["top_logprobs"] for entry in none["logprobs"]["content"]] == [[], []]


def test_a_scored_prompt_has_the_same_values_warm_and_in_a_stream(api: Any) -> None:
    """C076, C077, C078, C079: a prompt of several chunks, and every combination of echo and logprobs."""
    prompt = [900 + i % 500 for i in range(300)]
    body = {**COMPLETION, "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1}

    cold, warm = (api.ask(COMPLETIONS, body)["choices"][0] for _ in range(2))

    assert cold == warm and cold["logprobs"]["token_logprobs"][0] is None
    assert len(cold["logprobs"]["token_logprobs"]) == 301 and None not in cold["logprobs"]["token_logprobs"][1:]
    for asked in ({}, {"echo": True}, {"logprobs": 0}, {"echo": True, "logprobs": 0}):
        short = {**COMPLETION, "max_tokens": 2, **asked}
        assert api.text_of(api.stream(COMPLETIONS, short)) == (api.ask(COMPLETIONS, short)["choices"][0]["text"])


def test_tokens_that_a_stop_string_holds_back_keep_their_own_entries(api: Any) -> None:
    """C080: two begin like a stop string and go on otherwise; entries come with their text, and end with it."""
    body = {**COMPLETION, "guided_choice": ["Hello there, friend! Goodbye then."], "max_tokens": 30, "logprobs": 2}
    plain = api.ask(COMPLETIONS, body)["choices"][0]["logprobs"]

    stopped = {**body, "stop": ["there, foe", "Goodbye"]}
    answer = api.ask(COMPLETIONS, stopped)
    parts = [event["choices"][0]["logprobs"] or {} for event in api.stream(COMPLETIONS, stopped)]

    [choice] = answer["choices"]
    assert choice["text"] == "Hello there, friend! " and choice["finish_reason"] == "stop"
    num_tokens = answer["usage"]["completion_tokens"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert choice["logprobs"][name] == [value for part in parts for value in part.get(name, [])]
        assert len(choice["logprobs"][name]) == num_tokens
    assert choice["logprobs"]["tokens"] == plain["tokens"][:num_tokens]
    assert "".join(plain["tokens"]).startswith("Hello there, friend! Goodbye then.")
    shown = zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True)
    assert all(token in top for token, top in shown)
