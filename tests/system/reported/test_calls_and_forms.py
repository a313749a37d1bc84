"""What users of other servers reported of tool calls and of forms of answers, through a prefill and a decode node."""

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHATS = "/v1/chat/completions"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"model": "test", "messages": [{"role": "user", "content": "⟦call⟧"}], "temperature": 0, "tools": [WEATHER]}
WRITTEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def streamed_calls(events: list[dict[str, Any]]) -> tuple[list[str], str]:
    """Return the names and the joined arguments of the calls in a stream."""
    calls = [call for event in events for c in event["choices"] for call in c["delta"].get("tool_calls") or ()]
    names = [call["function"]["name"] for call in calls if call["function"].get("name")]
    return names, "".join(call["function"].get("arguments") or "" for call in calls)


def reason_of(events: list[dict[str, Any]]) -> str:
    """Return the one reason of a stream of one choice."""
    [reason] = [c["finish_reason"] for event in events for c in event["choices"] if c["finish_reason"]]
    return str(reason)


@pytest.mark.parametrize("script", ["⟦call⟧", "⟦spaces⟧"])
def test_a_reason_says_tool_calls_where_there_is_a_call(reading_api: Any, script: str) -> None:
    """C098: and nowhere else, of the model's own accord, streamed or not."""
    body = {**CALL, "messages": [{"role": "user", "content": script}]}

    choice = reading_api.ask(CHATS, body)["choices"][0]
    events = reading_api.stream(CHATS, body)

    calls = choice["message"].get("tool_calls") or []
    assert [call["function"]["name"] for call in calls] == (["weather"] if script == "⟦call⟧" else [])
    assert choice["finish_reason"] == reason_of(events) == ("tool_calls" if calls else "stop")
    assert streamed_calls(events)[0] == [call["function"]["name"] for call in calls]


def test_none_is_no_call_whatever_the_model_writes(reading_api: Any) -> None:
    """C099."""
    body = {**CALL, "tool_choice": "none"}

    choice = reading_api.ask(CHATS, body)["choices"][0]
    events = reading_api.stream(CHATS, body)

    assert choice["message"]["content"] == WRITTEN == reading_api.text_of(events)
    assert not choice["message"].get("tool_calls") and streamed_calls(events) == ([], "")
    assert choice["finish_reason"] == reason_of(events) == "stop"


@pytest.mark.parametrize("max_tokens", [2, 3, 4])
def test_a_call_that_max_tokens_cuts_is_no_reason_to_make_one(reading_api: Any, max_tokens: int) -> None:
    """C099: the reason is the length, streamed or not."""
    body = {**CALL, "max_tokens": max_tokens}

    choice = reading_api.ask(CHATS, body)["choices"][0]
    events = reading_api.stream(CHATS, body)

    assert choice["finish_reason"] == reason_of(events) == "length"
    whole = [call["function"]["arguments"] for call in choice["message"].get("tool_calls") or ()]
    assert streamed_calls(events)[1] == "".join(whole)


@pytest.mark.parametrize("schema", [{}, {"type": "object"}])
def test_a_schema_that_says_nothing_is_any_object(api: Any, schema: dict[str, Any]) -> None:
    """C102: never one number without an end; what is cut says so."""
    form = {"type": "json_schema", "json_schema": {"name": "anything", "schema": schema}}
    body = {"model": "test", "messages": [{"role": "user", "content": "Count."}], "response_format": form}

    choice = api.ask(CHATS, {**body, "temperature": 1, "seed": 1, "max_tokens": 24})["choices"][0]

    content = choice["message"]["content"]
    assert content.startswith("{")
    assert choice["finish_reason"] == "length" or isinstance(json.loads(content), dict)
