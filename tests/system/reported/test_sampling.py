"""What users of other servers reported of sampling and of limits, through a prefill and a decode node."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
COMPLETION = {"model": "test", "prompt": "One, two, three,", "temperature": 0}


def test_without_a_seed_requests_differ_and_with_one_choices_repeat(api: Any) -> None:
    """C055, C056: one after the other, at once, and by index."""
    body = {**COMPLETION, "prompt": "The weather", "temperature": 1, "max_tokens": 40, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(lambda _: api.ask(COMPLETIONS, body)["choices"][0]["text"], range(4)))
    alone = [api.ask(COMPLETIONS, body)["choices"][0]["text"] for _ in range(2)]
    assert len({*at_once, *alone}) == 6

    seeded = {**body, "seed": 42, "n": 3, "prompt": ["The weather", "The weather"]}
    first, second = (api.ask(COMPLETIONS, seeded)["choices"] for _ in range(2))
    texts = [choice["text"] for choice in first]
    assert texts == [choice["text"] for choice in second]
    assert len(set(texts[:3])) == 3 and texts[:3] == texts[3:]


def test_vanishing_randomness_is_greedy(api: Any) -> None:
    """C048."""
    body = {**COMPLETION, "max_tokens": 6}
    greedy = api.ask(COMPLETIONS, body)["choices"][0]["text"]

    for fields in ({"temperature": 0.0001}, {"temperature": 1, "top_p": 0.0001}, {"temperature": 1e-8}):
        assert api.ask(COMPLETIONS, {**body, **fields})["choices"][0]["text"] == greedy


def test_bans_hold_at_any_temperature_and_penalties_leave_the_prompt_alone(api: Any) -> None:
    """C053, C059, C060, C061, C062."""
    repeated = {**COMPLETION, "prompt": "yes yes yes yes yes yes yes yes", "max_tokens": 1}
    [plain, punished] = [
        api.ask(COMPLETIONS, {**repeated, "presence_penalty": penalty})["choices"][0]["text"] for penalty in (0, 2)
    ]
    assert plain == punished

    four = {**COMPLETION, "allowed_token_ids": [28, 29, 30, 31], "temperature": 2, "max_tokens": 24, "ignore_eos": True}
    banned = {**four, "logit_bias": {"28": -100}, "bad_words": ["-"], "return_token_ids": True}
    choice = api.ask(COMPLETIONS, banned)["choices"][0]
    assert set(choice["token_ids"]) <= {29, 30, 31} and 28 not in choice["token_ids"] and "-" not in choice["text"]


def test_a_prompt_that_does_not_fit_is_refused_and_never_cut(disaggregated: Any, api: Any) -> None:
    """C064, C066, C067: both numbers are told, and the limit is not blamed on what nobody sent."""
    status, content = disaggregated.get("/v1/models")
    limit = content["data"][0]["max_model_len"]
    assert status == 200

    for fields in ({"prompt": [5] * (limit + 1)}, {"prompt": [5] * 30, "max_tokens": limit}):
        error = api.refuse(COMPLETIONS, {**COMPLETION, **fields})
        assert error["code"] == "context_length_exceeded"
        assert str(limit) in error["message"] and str(len(fields["prompt"])) in error["message"]
        assert "-" not in error["message"].replace("max-model-len", "")


def test_a_full_context_is_refused_at_its_limit(disaggregated: Any, api: Any) -> None:
    """C063, C065: a prompt that leaves no room is refused at once; one can be scored without an answer."""
    _, content = disaggregated.get("/v1/models")
    limit = content["data"][0]["max_model_len"]
    body = {**COMPLETION, "max_tokens": None}

    for num_tokens in (limit, limit + 1):
        error = api.refuse(COMPLETIONS, {**body, "prompt": [5] * num_tokens})
        assert error["code"] == "context_length_exceeded"
    scored = api.ask(COMPLETIONS, {**COMPLETION, "prompt": [5] * 40, "echo": True, "max_tokens": 0})
    assert scored["usage"]["completion_tokens"] == 0 and scored["choices"][0]["finish_reason"] == "length"


def test_neighbours_and_a_warm_cache_change_no_greedy_answer(api: Any) -> None:
    """C051, C052, C057, C058: alone, again, and among longer and shorter prompts with penalties of their own."""
    lines = "One sheep, two sheep, three sheep. " * 6
    asked = [
        {"prompt": "Count: one, two,"},
        {"prompt": lines, "frequency_penalty": 1.05, "presence_penalty": 0.5},
        {"prompt": lines[:120], "repetition_penalty": 1.3},
        {"prompt": lines + "And", "logit_bias": {"28": -100}},
    ]
    bodies = [{**COMPLETION, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True, **each} for each in asked]

    alone = [api.ask(COMPLETIONS, body)["choices"][0]["token_ids"] for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: api.ask(COMPLETIONS, body), bodies))

    assert [answer["choices"][0]["token_ids"] for answer in together] == alone
    assert together[3]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    plain = {**bodies[2], "repetition_penalty": 1}
    assert api.ask(COMPLETIONS, plain)["choices"][0]["token_ids"] != alone[2], "the penalty changes something"
