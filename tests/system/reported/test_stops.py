"""What users of other servers reported of the ends of answers, through a prefill and a decode node."""

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = {"model": "test", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
COMPLETION = {"model": "test", "prompt": "One, two, three,", "temperature": 0}


@pytest.mark.parametrize(
    ("said", "stop", "shown"),
    [
        ("a b c d e f g h i j k l m n o p", ["f g h i j"], "a b c d e "),
        ("aaab and so on", ["aab"], "a"),
        ("so bca follows ab here", ["ab", "bca"], "so "),
        ("Thought: x\nObservation: y", ["\nObs"], "Thought: x"),
        ("nothing of it", ["never", "it is"], "nothing of it"),
    ],
)
def test_stop_strings_lie_where_they_like_and_are_never_shown(
    disaggregated: Any, api: Any, said: str, stop: list[str], shown: str
) -> None:
    """C031, C032, C038, C040: text, tokens, logprobs and usage end together; a string alone is a list of one (C037)."""
    body = {**COMPLETION, "guided_choice": [said], "stop": stop, "max_tokens": 60, "logprobs": 0}

    whole = api.ask(COMPLETIONS, body)
    events = api.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})

    choice = whole["choices"][0]
    assert choice["text"] == api.text_of(events) == shown and choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    if len(stop) == 1:
        assert api.ask(COMPLETIONS, {**body, "stop": stop[0]})["choices"][0]["text"] == shown
    if shown != said:
        kept = api.ask(COMPLETIONS, {**body, "include_stop_str_in_output": True})["choices"][0]["text"]
        assert kept == shown + next(each for each in stop if said.startswith(shown + each))
    disaggregated.wait_idle()


def test_no_stop_is_no_stop_and_an_empty_one_is_refused(api: Any) -> None:
    """C036."""
    body = {**COMPLETION, "max_tokens": 8}
    expected = api.ask(COMPLETIONS, body)["choices"][0]

    for stop in ([], None):
        assert api.ask(COMPLETIONS, {**body, "stop": stop})["choices"][0] == expected
    for stop in ("", [""], ["x", ""]):
        assert api.refuse(COMPLETIONS, {**body, "stop": stop, "stream": True})["param"] == "stop"


def test_min_tokens_hold_stop_strings_and_ids_back(api: Any) -> None:
    """C042: what ends within the first min_tokens never fires, not later either."""
    said = "a, b c d e f g h, i j"
    body = {**COMPLETION, "guided_choice": [said], "stop": [","], "max_tokens": 60}

    assert api.ask(COMPLETIONS, body)["choices"][0]["text"] == "a"
    late = api.ask(COMPLETIONS, {**body, "min_tokens": 5})

    assert late["choices"][0]["text"] == "a, b c d e f g h" and late["usage"]["completion_tokens"] >= 5


def test_a_grammar_that_is_complete_wins_over_min_tokens(api: Any) -> None:
    """C044."""
    schema: dict[str, Any] = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}

    answer = api.ask(CHATS, {**CHAT, "response_format": form, "min_tokens": 64, "max_tokens": 100})

    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop" and type(json.loads(choice["message"]["content"])["ok"]) is bool


def test_ignore_eos_runs_to_its_length(api: Any) -> None:
    """C047: stop ids that the user gave still end the answer."""
    body = {**CHAT, "max_tokens": 30, "ignore_eos": True}

    answer = api.ask(CHATS, {**body, "return_token_ids": True})

    choice = answer["choices"][0]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 30)
    stopped = api.ask(CHATS, {**body, "stop_token_ids": [choice["token_ids"][3]]})
    assert stopped["choices"][0]["finish_reason"] == "stop" and stopped["usage"]["completion_tokens"] <= 4


def test_min_tokens_counts_exactly_and_holds_every_end_back(api: Any) -> None:
    """C043: EOS is forced, and ends the answer as the token behind min_tokens."""
    for num_tokens in (0, 1, 4):
        body = {**COMPLETION, "logit_bias": {"2": 100}, "min_tokens": num_tokens, "max_tokens": 12}
        answer = api.ask(COMPLETIONS, body)
        assert answer["usage"]["completion_tokens"] == num_tokens + 1
        assert answer["choices"][0]["finish_reason"] == "stop"


SCRIPTED = {"model": "test", "temperature": 0}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def scripted_chat(script: str) -> dict[str, Any]:
    """Return a chat that the scripted model answers as written."""
    return {**SCRIPTED, "messages": [{"role": "user", "content": script}]}


def test_a_stop_string_that_begins_like_a_marker_leaves_the_marker_whole(reading_api: Any) -> None:
    """C034: thoughts and answer are those of a run without it."""
    for fields in ({}, {"stop": ["</think> of all that is never said"]}, {"stop": ["</thinking", "k> or not"]}):
        body = {**scripted_chat("⟦thoughts⟧"), **fields}
        message = reading_api.ask(CHATS, body)["choices"][0]["message"]
        events = reading_api.stream(CHATS, body)
        assert (message["reasoning_content"], message["content"]) == ("Since so", "it is")
        assert reading_api.text_of(events, name="reasoning_content") == "Since so"
        assert reading_api.text_of(events) == "it is"


def test_text_held_for_a_call_is_told_when_a_stop_string_ends_the_answer(reading_api: Any) -> None:
    """C035."""
    body = {**scripted_chat("⟦call⟧"), "tools": [WEATHER], "stop": ['er", "arg']}

    choice = reading_api.ask(CHATS, body)["choices"][0]
    events = reading_api.stream(CHATS, body)

    assert choice["message"]["content"] == '<tool_call>\n{"name": "weath' == reading_api.text_of(events)
    assert not choice["message"].get("tool_calls") and choice["finish_reason"] == "stop"
    assert [c["finish_reason"] for event in events for c in event["choices"] if c["finish_reason"]] == ["stop"]


@pytest.mark.parametrize(
    ("script", "said"),
    [("⟦config⟧", " first"), ("⟦generation config⟧", " second"), ("⟦tokenizer⟧", " third")],
)
def test_an_answer_ends_on_the_ids_of_every_file_that_names_one(
    scripted_api: Any, reading_api: Any, script: str, said: str
) -> None:
    """C045, C046: also where generation_config.json is left aside for sampling; no marker is shown."""
    for gateway in (scripted_api, reading_api):
        body = {**SCRIPTED, "prompt": script, "max_tokens": 8}
        answer = gateway.ask(COMPLETIONS, body)
        assert answer["choices"][0]["text"] == said == gateway.text_of(gateway.stream(COMPLETIONS, body))
        assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 2
        further = gateway.ask(COMPLETIONS, {**body, "ignore_eos": True})["choices"][0]
        assert further["text"].startswith(said) and further["text"].endswith(" leaked leaked")
