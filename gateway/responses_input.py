"""The `input` of a response -> messages of a chat."""

from collections.abc import Mapping
from typing import Any

from pdserve.engine.errors import InvalidRequest

_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")


def input_messages(given: object) -> list[dict[str, Any]]:
    """Return the messages of `given`: a text, or a list of messages, function calls and their outputs.

    Reasoning items are left out: the model is not shown what it thought before.

    Raises:
        InvalidRequest: an item is wrong, or is of a kind that is not supported.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("input", "must be a string or a non-empty list of items")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        field = f"input.{index}"
        if not isinstance(item, dict):
            raise InvalidRequest(field, "must be an object")
        _add(messages, item, field)
    return messages


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], field: str) -> None:
    match item.get("type", "message"):
        case "message":
            messages.append(_message(item, field))
        case "function_call":
            call = _call(item, field)
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        case "function_call_output":
            call_id = _text_of(item, "call_id", field)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(item.get("output"), field)})
        case "reasoning":
            pass
        case _:
            supported = "message, function_call, function_call_output, reasoning"
            raise InvalidRequest(f"{field}.type", f"is not supported; {supported} are")


def _message(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{field}.role", f"must be one of {', '.join(_ROLES)}")
    content = _content(item.get("content"), f"{field}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _content(content: object, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(field, "must be a string or a non-empty list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{field}.{index}", "only text parts are supported by this model")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    function = {"name": _text_of(item, "name", field), "arguments": _text_of(item, "arguments", field)}
    return {"id": _text_of(item, "call_id", field), "type": "function", "function": function}


def _text_of(item: Mapping[str, Any], name: str, field: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{field}.{name}", "must be a string")
    return value
