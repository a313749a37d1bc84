"""The `prompt` of a completion, in its four shapes, and the `messages` of a chat, made fit for a template."""

import json
from collections.abc import Sequence
from typing import Any

from pdserve.engine.errors import InvalidRequest

_SHAPES = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"

Prompt = str | list[int]


def parse_prompts(prompt: object, max_prompts: int) -> list[Prompt]:
    """Return the prompts in `prompt`, texts or token ids; nothing is encoded yet."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt", _SHAPES)
    if not prompt:
        raise InvalidRequest("prompt", "must not be empty")
    if _are_token_ids(prompt):
        return [prompt]
    if len(prompt) > max_prompts:
        raise InvalidRequest("prompt", f"at most {max_prompts} prompts, got {len(prompt)}")
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if not all(isinstance(item, list) and _are_token_ids(item) for item in prompt):
        raise InvalidRequest("prompt", _SHAPES)
    if not all(prompt):
        raise InvalidRequest("prompt", "a list of token ids must not be empty")
    return list(prompt)


def _are_token_ids(items: list[Any]) -> bool:
    # type() and not isinstance: true and false are no token ids.
    return all(type(item) is int for item in items)


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` as chat templates expect them.

    Text parts are joined by newlines; an assistant's null content is empty text; tool calls have their
    arguments as objects, and an empty list of them is none; a tool's result has the name of the tool.
    """
    shown = [_template_message(message, f"messages.{index}") for index, message in enumerate(messages)]
    calls = [call for message in shown for call in message.get("tool_calls", ())]
    names = {str(call.get("id")): call["function"].get("name") for call in calls}
    for message in shown:
        name = names.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and "name" not in message and isinstance(name, str):
            message["name"] = name  # some templates need it, and OpenAI's clients do not send it
    return shown


def _template_message(message: dict[str, Any], field: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{field}.role", "must be a non-empty string")
    kept = {name: value for name, value in message.items() if value is not None}
    tool_calls = kept.pop("tool_calls", None)
    if tool_calls:
        kept["tool_calls"] = _tool_calls(tool_calls, f"{field}.tool_calls")
    kept["content"] = _content(message.get("content"), role, f"{field}.content")
    return kept


def _content(content: object, role: str, field: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list) or not content:
        raise InvalidRequest(field, "must be a string or a non-empty list of text parts")
    return "\n".join([_part_text(part, f"{field}.{index}") for index, part in enumerate(content)])


def _part_text(part: object, field: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidRequest(f"{field}.type", "only text parts are supported by this model")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.text", "must be a string")
    return text


def _tool_calls(calls: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidRequest(field, "must be a list of objects")
    return [_tool_call(call, f"{field}.{index}") for index, call in enumerate(calls)]


def _tool_call(call: dict[str, Any], field: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{field}.function", "must be an object")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{field}.function.arguments", "must be JSON") from None
    if not isinstance(arguments, dict):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}
