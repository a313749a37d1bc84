"""POST /v1/messages: its body as a chat -> a plan. Anthropic's blocks become OpenAI's messages, for templates."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdserve.engine.errors import InvalidRequest
from pdserve.gateway.chat import plan_chat
from pdserve.gateway.deps import GatewayDeps
from pdserve.gateway.generation_plan import Endpoint, GenerationPlan
from pdserve.gateway.messages_schema import CountTokensBody, MessagesBody
from pdserve.gateway.request_body import validated
from pdserve.gateway.schemas import ChatBody
from pdserve.gateway.unsupported_fields import warning_header

_THOUGHTS = ("thinking", "redacted_thinking")  # a model is not shown what it thought before
_TOOL_CHOICES: dict[str, str] = {"auto": "auto", "any": "required", "none": "none"}


async def plan_messages(body: MessagesBody, deps: GatewayDeps) -> GenerationPlan:
    """Validate `body`, render its messages and tokenize them.

    Raises:
        InvalidRequest: a field is wrong, under the name that the client gave it.
    """
    sampling = {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "stream": body.stream,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "return_route_info": body.return_route_info,
    }
    plan = await _plan(body, sampling, deps)
    return replace(plan, endpoint=Endpoint.MESSAGES, response_id=f"msg_{uuid.uuid4().hex}")


async def count_prompt_tokens(body: CountTokensBody, deps: GatewayDeps) -> int:
    """Return how many tokens the prompt of `body` has.

    Raises:
        InvalidRequest: a field is wrong.
    """
    return (await _plan(body, {}, deps)).num_prompt_tokens


async def _plan(body: CountTokensBody, sampling: Mapping[str, Any], deps: GatewayDeps) -> GenerationPlan:
    """Return the plan of the chat that `body` stands for. `thinking` is leave to think, which not every model does."""
    if body.thinking is not None and body.thinking.type == "enabled" and body.thinking.budget_tokens is None:
        raise InvalidRequest("thinking.budget_tokens", "is required")
    fields: dict[str, Any] = {"model": body.model, "messages": chat_messages(body), **sampling, **_output(body)}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools.{index}") for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice)
    try:
        chat = validated(ChatBody, fields)
        warning_header(chat.model_extra or {}, deps.config)  # a translated field that is not supported is refused here
        return await plan_chat(chat, deps)
    except InvalidRequest as error:
        raise type(error)(_own_name(error.field, body), error.message) from None


def _own_name(field: str, body: CountTokensBody) -> str:
    """Return `field` of the chat as the client of this endpoint knows it."""
    own = field.replace("response_format.json_schema", _format_field(body)).replace(
        "reasoning_effort", "output_config.effort"
    )
    if own.startswith("tools."):
        return own.replace(".function.parameters", ".input_schema").replace(".function.", ".")
    return "stop_sequences" + own.removeprefix("stop") if own.split(".")[0] == "stop" else own


def _format_field(body: CountTokensBody) -> str:
    return "output_format" if body.output_format is not None else "output_config.format"


def _output(body: CountTokensBody) -> dict[str, Any]:
    """Return the form of the answer and the effort, as a chat has them."""
    config = body.output_config or {}
    form = config.get("format") if body.output_format is None else body.output_format
    fields: dict[str, Any] = {"reasoning_effort": config.get("effort")}
    if form is None:
        return fields
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise InvalidRequest(_format_field(body), "must be an object of the type json_schema")
    return {**fields, "response_format": {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}}


def chat_messages(body: CountTokensBody) -> list[dict[str, Any]]:
    """Return the system prompt and all messages as a chat: tool results become messages of their own."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages.{index}")
    return messages


def _messages(message: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise InvalidRequest(f"{field}.role", "must be user or assistant; a system prompt goes into system")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content or not all(isinstance(block, dict) for block in content):
        raise InvalidRequest(f"{field}.content", "must be a string or a non-empty list of blocks")
    results = [
        _tool_result(block, f"{field}.content.{index}")
        for index, block in enumerate(content)
        if block.get("type") == "tool_result"
    ]
    left_out = ("tool_result", *(_THOUGHTS if role == "assistant" else ()))
    rest = [(index, block) for index, block in enumerate(content) if block.get("type") not in left_out]
    if not rest:
        return results
    texts = [_block_text(block, f"{field}.content.{index}") for index, block in rest if block.get("type") != "tool_use"]
    said: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    calls = [_tool_call(block, f"{field}.content.{index}") for index, block in rest if block.get("type") == "tool_use"]
    if calls:
        said["tool_calls"] = calls
    return [*results, said]


def _text(content: object, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(field, "must be a string or a list of text blocks")
    return "\n".join([_block_text(block, f"{field}.{index}") for index, block in enumerate(content)])


def _block_text(block: object, field: str) -> str:
    if not isinstance(block, dict) or block.get("type") != "text":
        raise InvalidRequest(f"{field}.type", "only text, tool_use and tool_result blocks are supported by this model")
    if not isinstance(block.get("text"), str):
        raise InvalidRequest(f"{field}.text", "must be a string")
    return str(block["text"])


def _tool_result(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str) or not call_id:
        raise InvalidRequest(f"{field}.tool_use_id", "must be a non-empty string")
    text = _text(block.get("content") or "", f"{field}.content")
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _tool_call(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{field}.name", "must be a non-empty string")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{field}.input", "must be an object")
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


def _tool(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise InvalidRequest(f"{field}.type", "only tools that the client runs itself are supported")
    if not isinstance(tool.get("name"), str):
        raise InvalidRequest(f"{field}.name", "must be a string")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{field}.input_schema", "must be a JSON schema")
    if not isinstance(tool.get("description"), str | None):
        raise InvalidRequest(f"{field}.description", "must be a string")
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    fields: dict[str, Any] = {}
    is_single = choice.get("disable_parallel_tool_use")
    if not isinstance(is_single, bool | None):
        raise InvalidRequest("tool_choice.disable_parallel_tool_use", "must be true or false")
    if is_single:
        fields["parallel_tool_calls"] = False
    if kind == "tool":
        return {**fields, "tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    if kind not in _TOOL_CHOICES:
        raise InvalidRequest("tool_choice.type", f"must be tool or one of {', '.join(_TOOL_CHOICES)}")
    return {**fields, "tool_choice": _TOOL_CHOICES[str(kind)]}
