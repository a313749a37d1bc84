"""Tool calls of the demo model over the disaggregated path: at temperature 1, whatever the seed, enforced calls have
arguments that satisfy the schema of their function, over three protocols, streamed or not."""

import asyncio
import json
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_WEATHER: dict[str, Any] = {
    "$defs": {"unit": {"enum": ["C", "F"]}},
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
_TIMER: dict[str, Any] = {
    "type": "object",
    "properties": {"seconds": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["seconds"],
    "additionalProperties": False,
}
_SCHEMAS = {"weather": _WEATHER, "timer": _TIMER}
_FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in _SCHEMAS.items()]
_TOOLS = [{"type": "function", "function": function} for function in _FUNCTIONS]
_NAMED = {"type": "function", "function": {"name": "timer"}}
_ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
_NUM_SEEDS = 2
_MAX_TOKENS = 200  # more than the longest call has, whatever is sampled


async def _over_chat(client: openai.AsyncOpenAI) -> list[tuple[str, str]]:
    """Return the calls of whole and streamed answers to the same requests, which must not differ."""
    fields: dict[str, Any] = {"model": "test", "messages": _ASK, "tools": _TOOLS, "temperature": 1.0}
    fields |= {"max_tokens": _MAX_TOKENS, "parallel_tool_calls": False}
    calls = []
    for seed in range(_NUM_SEEDS):
        for choice, reason in (("required", "tool_calls"), (_NAMED, "stop")):
            answer = await client.chat.completions.create(**fields, tool_choice=choice, seed=seed)
            [call] = answer.choices[0].message.tool_calls
            assert answer.choices[0].finish_reason == reason
            streamed = ["", ""]
            async for chunk in await client.chat.completions.create(
                **fields, tool_choice=choice, seed=seed, stream=True
            ):
                for delta in chunk.choices[0].delta.tool_calls or ():
                    streamed[0] += delta.function.name or ""
                    streamed[1] += delta.function.arguments or ""
            assert streamed == [call.function.name, call.function.arguments]
            calls.append((call.function.name, call.function.arguments))
    return calls


async def _over_responses(client: openai.AsyncOpenAI) -> list[tuple[str, str]]:
    tools: list[Any] = [{"type": "function", **function} for function in _FUNCTIONS]
    response = await client.responses.create(
        model="test",
        input="Wake me.",
        tools=tools,
        tool_choice={"type": "function", "name": "timer"},
        max_output_tokens=_MAX_TOKENS,
    )
    [item] = response.output
    continued = await client.responses.create(
        model="test",
        previous_response_id=response.id,
        input=[{"type": "function_call_output", "call_id": item.call_id, "output": "done"}],
        max_output_tokens=4,
    )
    assert continued.status in ("completed", "incomplete")
    assert continued.usage.input_tokens > response.usage.input_tokens
    return [(item.name, item.arguments)]


async def _over_messages(url: str) -> list[tuple[str, str]]:
    tools: list[Any] = [{"name": name, "input_schema": schema} for name, schema in _SCHEMAS.items()]
    fields: dict[str, Any] = {"model": "test", "max_tokens": _MAX_TOKENS, "messages": _ASK, "tools": tools}
    fields["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=300) as client,
        client.messages.stream(**fields) as stream,
    ):
        message = await stream.get_final_message()
    [block] = message.content
    assert message.stop_reason == "tool_use" and block.type == "tool_use"
    return [(block.name, json.dumps(block.input))]


async def _all_calls(url: str) -> list[tuple[str, str]]:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300) as client:
        return [*await _over_chat(client), *await _over_responses(client), *await _over_messages(url)]


def test_enforced_calls_satisfy_the_schemas_of_their_functions(disaggregated: Any) -> None:
    """C097: required says tool_calls, a named function stop."""
    routes = disaggregated.status()["routes"]
    calls = asyncio.run(_all_calls(disaggregated.url))
    disaggregated.wait_idle()

    assert disaggregated.status()["routes"]["disaggregated"] > routes.get("disaggregated", 0)
    assert len(calls) == 2 * _NUM_SEEDS + 2
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), _SCHEMAS[name])


def test_calls_of_an_unknown_syntax_are_refused(disaggregated: Any) -> None:
    """C098: the demo model's template says nothing of calls, so that none is promised."""

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=disaggregated.url + "/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
                await client.chat.completions.create(model="test", messages=_ASK, tools=_TOOLS, max_tokens=4)

    asyncio.run(ask())
