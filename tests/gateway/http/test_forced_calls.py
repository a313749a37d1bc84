"""A tool that must be called: the answer is its arguments, held to its schema; stream and whole are the same."""

import json

import pytest

from pdserve.engine.structured_outputs import StructuredOutputsParams

PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
CHOSEN = {"type": "function", "function": {"name": "weather"}}
BASE = {"model": "org/demo", "messages": [{"role": "user", "content": "hi"}], "tools": [TIME, WEATHER]}
ARGUMENTS = '{"city": "Genève"}'


async def test_a_named_tool_is_called_with_arguments_of_its_schema(gateway):
    """C097: forced by name, the finish reason is stop."""
    gateway.say(ARGUMENTS)

    status, body, _ = await gateway.post(PATH, {**BASE, "tool_choice": CHOSEN, "n": 2})

    assert status == 200
    for choice in body["choices"]:
        [call] = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
        assert (call["type"], choice["message"]["content"], choice["finish_reason"]) == ("function", None, "stop")
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]}) == 2
    sampling = gateway.source.started[0].request.sampling
    assert sampling.structured_outputs == StructuredOutputsParams(json=SCHEMA)


async def test_streamed_deltas_are_the_whole_call(gateway):
    """C097: the same in a stream."""
    gateway.say(ARGUMENTS)
    name, arguments, ids, reasons = "", "", set(), []

    body = json.dumps({**BASE, "tool_choice": CHOSEN, "stream": True})
    headers = {"Content-Type": "application/json"}
    async with gateway.session.post(gateway.url + PATH, data=body, headers=headers) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            [choice] = json.loads(line[6:])["choices"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            for call in choice["delta"].get("tool_calls", ()):
                assert call["index"] == 0
                ids |= {call["id"]} if "id" in call else set()
                name += call["function"].get("name", "")
                arguments += call["function"]["arguments"]

    assert (name, arguments, len(ids), reasons) == ("weather", ARGUMENTS, 1, ["stop"])


async def test_a_cut_call_says_length(gateway):
    """C099."""
    gateway.say(ARGUMENTS)

    _, body, _ = await gateway.post(PATH, {**BASE, "tool_choice": CHOSEN, "max_tokens": 2})

    assert body["choices"][0]["finish_reason"] == "length"


async def test_none_is_plain_text(gateway):
    """C099: no tool is shown, none can be called."""
    _, body, _ = await gateway.post(PATH, {**BASE, "tool_choice": "none"})

    assert body["choices"][0]["message"]["content"] == "Hello there, friend!"
    assert "tool_calls" not in body["choices"][0]["message"]
    assert gateway.source.started[0].request.sampling.structured_outputs is None


async def test_a_tool_without_parameters_takes_none(gateway):
    chosen = {"type": "function", "function": {"name": "time"}}

    status, _, _ = await gateway.post(PATH, {**BASE, "tool_choice": chosen})

    assert status == 200
    form = gateway.source.started[0].request.sampling.structured_outputs
    assert json.loads(form.json)["additionalProperties"] is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "tools"),
        ({"tool_choice": "auto"}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": CHOSEN, "tools": []}, "tool_choice"),
        ({"tool_choice": CHOSEN, "tools": [{"type": "function"}]}, "tools.0"),
        (
            {"tool_choice": CHOSEN, "tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools.0.function.name",
        ),
        ({"tool_choice": CHOSEN, "response_format": {"type": "json_object"}}, "response_format"),
        (
            {
                "tool_choice": CHOSEN,
                "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "x"}}}],
            },
            "tools.0.function.parameters",
        ),
    ],
)
async def test_what_cannot_be_enforced_is_refused_by_name(gateway, fields, param):
    """C098: no call is promised that is not enforced."""
    status, body, _ = await gateway.post(PATH, {**BASE, **fields})

    assert (status, body["error"]["param"]) == (400, param)
