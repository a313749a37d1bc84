"""What users of other servers reported of what is sent to them, through a prefill and a decode node."""

from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
COMPLETION = {"model": "test", "prompt": "One, two, three,", "temperature": 0}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0, "stream": True}, "n"),
        ({"stop_token_ids": [49152], "min_tokens": 1}, "stop_token_ids"),
        ({"logit_bias": {"49162": -100}}, "logit_bias"),
        ({"prompt": [0, 49152]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 100_000}, "prompt_logprobs"),
        ({"temperature": 999999}, "temperature"),
        ({"bad_words": [""]}, "bad_words.0"),
    ],
)
def test_what_would_hurt_the_engine_never_reaches_it(api: Any, fields: dict[str, Any], param: str) -> None:
    """C016, C041, C049, C059, C061, C063, C081, C082, C109, C110: a plain 400, and the next answer is right."""
    error = api.refuse(COMPLETIONS, {**COMPLETION, **fields})

    assert error["param"] == param
    assert api.ask(COMPLETIONS, {**COMPLETION, "max_tokens": 1})["choices"][0]["text"]


def test_a_prompt_of_the_beginning_alone_is_answered(api: Any) -> None:
    """C109: one token, which is what an empty prompt is where texts have a beginning."""
    answer = api.ask(COMPLETIONS, {**COMPLETION, "prompt": [1], "max_tokens": 3})

    assert answer["usage"]["prompt_tokens"] == 1 and answer["usage"]["completion_tokens"] == 3


SCRIPTED = {"model": "test", "prompt": "⟦spaces⟧", "temperature": 0}
SAID = "  leading x hello world"


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_to_answer_is_refused_by_name(scripted_api: Any, stream: bool) -> None:
    """C108."""
    for prompt in ([], [[]], [""], "", [[1], []], None):
        error = scripted_api.refuse(COMPLETIONS, {**SCRIPTED, "prompt": prompt, "stream": stream})
        assert error["param"] == "prompt"
    assert scripted_api.refuse(CHATS, {"model": "test", "messages": [], "stream": stream})["param"] == "messages"
    assert scripted_api.ask(COMPLETIONS, SCRIPTED)["choices"][0]["text"] == SAID


def test_prompts_of_a_list_stay_apart_in_every_shape(scripted_api: Any) -> None:
    """C111: choice p * n + j is the j-th of prompt p, in streams, with echo, and as token ids."""
    prompts, answers = ["⟦spaces⟧", "⟦config⟧"], [SAID, " first"]
    ids = [scripted_api.ask("/tokenize", {"prompt": prompt})["tokens"] for prompt in prompts]
    shapes = [(prompts[0], [0]), (ids[0], [0]), (prompts, [0, 1]), (ids, [0, 1]), (ids[::-1], [1, 0])]

    for prompt, order in shapes:
        for echo in (False, True):
            body = {**SCRIPTED, "prompt": prompt, "n": 2, "echo": echo}
            expected = [(prompts[p] if echo else "") + answers[p] for p in order for _ in range(2)]
            choices = scripted_api.ask(COMPLETIONS, body)["choices"]
            events = scripted_api.stream(COMPLETIONS, body)
            assert [choice["index"] for choice in choices] == list(range(len(expected)))
            assert [choice["text"] for choice in choices] == expected
            assert [scripted_api.text_of(events, index) for index in range(len(expected))] == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 1_000_000_000}, "n"),
        ({"n": 10**30}, "n"),
        ({"best_of": 1_000_000_000}, "best_of"),
        ({"prompt": ["a"] * 100_000}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_request_fans_out_within_bounds(scripted_api: Any, fields: dict[str, Any], param: str) -> None:
    """C112."""
    for stream in (False, True):
        assert scripted_api.refuse(COMPLETIONS, {**SCRIPTED, **fields, "stream": stream})["param"] == param
    assert scripted_api.ask(COMPLETIONS, SCRIPTED)["choices"][0]["text"] == SAID


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": "true"},
        {"stream": "false"},
        {"stream": 1},
        {"n": "2"},
        {"n": True},
        {"temperature": "0.5"},
        {"temperature": True},
        {"max_tokens": True},
        {"max_tokens": 5.5},
        {"max_tokens": "5"},
        {"seed": "x"},
        {"logprobs": "3"},
        {"logprobs": True},
        {"echo": "false"},
        {"ignore_eos": 0},
    ],
    ids=str,
)
def test_types_are_not_guessed(scripted_api: Any, fields: dict[str, Any]) -> None:
    """C115."""
    assert scripted_api.refuse(COMPLETIONS, {**SCRIPTED, **fields})["param"] == next(iter(fields))


def test_a_whole_number_may_be_written_with_a_point(scripted_api: Any) -> None:
    """C115: JSON has one kind of number."""
    answer = scripted_api.ask(COMPLETIONS, {**SCRIPTED, "max_tokens": 3.0, "n": 1.0})

    assert answer["usage"]["completion_tokens"] == 3 and len(answer["choices"]) == 1


def test_fields_that_nobody_knows_are_told_and_those_of_openai_taken(scripted_api: Any, reading_api: Any) -> None:
    """C116: refused by a strict gateway, answered with a warning by any other."""
    known = {"service_tier": "auto", "metadata": {}, "store": False, "parallel_tool_calls": True, "user": "x"}
    chat = {"model": "test", "messages": [{"role": "user", "content": "⟦spaces⟧"}], "temperature": 0}

    taken = reading_api.post(CHATS, {**chat, **known})
    assert taken.status == 200 and "x-pdserve-warning" not in taken.headers, taken.content
    assert reading_api.refuse(CHATS, {**chat, "enable_thinking": True})["param"] == "enable_thinking"
    warned = scripted_api.post(COMPLETIONS, {**SCRIPTED, "foo": 1})
    assert warned.status == 200 and "foo" in warned.headers["x-pdserve-warning"]
    assert warned.headers["x-pdserve-route"] == "disaggregated"


def test_a_model_is_known_by_the_name_that_the_list_shows(scripted_api: Any, scripted: Any) -> None:
    """C120."""
    _, models = scripted.get("/v1/models")
    assert [model["id"] for model in models["data"]] == ["test"]

    for stream in (False, True):
        error = scripted_api.refuse(COMPLETIONS, {**SCRIPTED, "model": "nope", "stream": stream}, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        for wrong in ({"model": ""}, {"model": 5}, {"model": None}):
            assert scripted_api.refuse(COMPLETIONS, {**SCRIPTED, **wrong, "stream": stream})["param"] == "model"
    assert scripted_api.refuse(COMPLETIONS, {"prompt": "x"})["param"] == "model"
    assert scripted_api.ask(COMPLETIONS, SCRIPTED)["model"] == "test"
    assert {event["model"] for event in scripted_api.stream(COMPLETIONS, SCRIPTED)} == {"test"}
