"""The tools of a chat and what is said of their choice: which functions the model is told of, which it must call."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.engine.errors import InvalidRequest
from pdserve.engine.structured_outputs import StructuredOutputsParams
from pdserve.gateway.answer_reader import FreeCalls, NamedCall, RequiredCalls
from pdserve.gateway.schemas import ChatBody
from pdserve.gateway.structured_fields import AskedForm
from pdserve.gateway.tool_syntax import ToolSyntax

_MAX_TOOLS = 128
_MAX_REQUIRED_CALLS = 16
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class AskedCalls:
    """Which calls an answer may or must have; `form` enforces them, `tools` are what the chat template shows."""

    calls: NamedCall | RequiredCalls | FreeCalls | None
    is_only_first: bool = False
    form: AskedForm | None = None
    tools: tuple[dict[str, Any], ...] = ()


def asked_calls(body: ChatBody, syntax: ToolSyntax | None) -> AskedCalls:
    """Return the calls that `body` asks for. With `none`, and without tools, the model is told of none.

    Raises:
        InvalidRequest: a tool is malformed, the named one is missing, or the model is to choose by itself while it is
            not known in which `syntax` it does.
    """
    choice = "auto" if body.tool_choice is None else body.tool_choice
    if not body.tools and choice in ("auto", "none"):
        return AskedCalls(None)
    if not body.tools:
        raise InvalidRequest("tool_choice", "needs tools")
    if len(body.tools) > _MAX_TOOLS:
        raise InvalidRequest("tools", f"at most {_MAX_TOOLS} tools, got {len(body.tools)}")
    functions = [_function(tool, f"tools.{index}") for index, tool in enumerate(body.tools)]
    is_only_first = body.parallel_tool_calls is False
    tools = tuple(body.tools)
    match choice:
        case "none":
            return AskedCalls(None)
        case "required":
            form = _form(_calls_schema(functions, 1 if is_only_first else _MAX_REQUIRED_CALLS), "tools")
            return AskedCalls(RequiredCalls(), is_only_first, form, tools)
        case "auto":
            if syntax is None:
                raise InvalidRequest(
                    "tools",
                    "it is not known how this model writes calls (--tool-call-parser tells the server): "
                    'tool_choice must be "required", "none" or name a function',
                )
            names = frozenset(function["name"] for function in functions)
            return AskedCalls(FreeCalls(syntax, names), is_only_first, None, tools)
        case _:
            name, form = _named(choice, functions)
            return AskedCalls(NamedCall(name), is_only_first, form, tools)


def _function(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise InvalidRequest(field, "must be an object with type function and a function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{field}.function.name", "must have 1 to 64 letters, digits, underscores and hyphens")
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequest(f"{field}.function.description", "must be a string")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequest(f"{field}.function.strict", "must be true or false")
    if not isinstance(function.get("parameters"), dict | None):
        raise InvalidRequest(f"{field}.function.parameters", "must be a JSON schema")
    return function


def _named(choice: object, functions: Sequence[Mapping[str, Any]]) -> tuple[str, AskedForm]:
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) else None
    for index, function in enumerate(functions):
        if function["name"] == name:
            return function["name"], _form(_parameters(function), f"tools.{index}.function.parameters")
    shape = "{type: function, function: {name: ...}}"
    raise InvalidRequest("tool_choice", f'must be "auto", "none", "required", or name one of the tools: {shape}')


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function.get("parameters") or _NO_PARAMETERS


def _form(schema: Mapping[str, Any], field: str) -> AskedForm:
    try:
        return AskedForm(StructuredOutputsParams(json=json.dumps(schema)), field)
    except InvalidRequest as error:
        raise InvalidRequest(field, error.message) from None


def _calls_schema(functions: Sequence[Mapping[str, Any]], max_calls: int) -> dict[str, Any]:
    """Return the schema of a list of calls. A schema of arguments moves to its own place, with its references."""
    places = [f"#/$defs/tool{index}" for index in range(len(functions))]
    moved = [_moved(_parameters(function), place) for function, place in zip(functions, places, strict=True)]
    call_schemas = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": place}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function, place in zip(functions, places, strict=True)
    ]
    return {
        "$defs": {f"tool{index}": schema for index, schema in enumerate(moved)},
        "type": "array",
        "minItems": 1,
        "maxItems": max_calls,
        "items": {"anyOf": call_schemas},
    }


def _moved(value: Any, place: str) -> Any:
    if isinstance(value, list):
        return [_moved(item, place) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {name: _moved(inner, place) for name, inner in value.items() if name not in ("$schema", "$id")}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
