"""POST /v1/responses: its body as a chat -> a plan, on top of the conversation that it continues."""

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdserve.engine.errors import InvalidRequest
from pdserve.gateway.chat import plan_chat
from pdserve.gateway.deps import GatewayDeps
from pdserve.gateway.error_responses import ErrorReply, HttpError
from pdserve.gateway.generation_plan import Endpoint, GenerationPlan
from pdserve.gateway.request_body import validated
from pdserve.gateway.responses_input import input_messages
from pdserve.gateway.responses_schema import InputTokensBody, ResponsesBody
from pdserve.gateway.schemas import ChatBody
from pdserve.gateway.unsupported_fields import warning_header

_OWN_NAMES = {  # the longer ones first
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = frozenset(  # OpenAI's; what tools of a server would add is never there
    {
        _LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)


async def plan_response(body: ResponsesBody, deps: GatewayDeps) -> GenerationPlan:
    """Validate `body`, fetch what it continues, render the conversation and tokenize it.

    Raises:
        InvalidRequest: a field is wrong.
        HttpError: the previous response is not kept (any more).
    """
    _check_modes(body)
    has_logprobs = body.top_logprobs is not None or _LOGPROBS in (body.include or ())
    sampling: dict[str, Any] = {
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "seed": body.seed,
        "stream": body.stream,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "return_route_info": body.return_route_info,
        **({"logprobs": True, "top_logprobs": body.top_logprobs} if has_logprobs else {}),
    }
    conversation, plan = await _plan(body, sampling, deps)
    return replace(
        plan, endpoint=Endpoint.RESPONSES, response_id=f"resp_{uuid.uuid4().hex}", conversation=tuple(conversation)
    )


async def num_input_tokens(body: InputTokensBody, deps: GatewayDeps) -> int:
    """Return how many tokens the prompt of `body` has, with all that it continues.

    Raises:
        InvalidRequest: a field is wrong.
        HttpError: the previous response is not kept (any more).
    """
    _, plan = await _plan(body, {}, deps)
    return plan.num_prompt_tokens


async def _plan(
    body: InputTokensBody, sampling: Mapping[str, Any], deps: GatewayDeps
) -> tuple[list[dict[str, Any]], GenerationPlan]:
    """Return the conversation without the instructions, and the plan of the chat that `body` stands for."""
    if body.truncation not in (None, "disabled", "auto"):
        raise InvalidRequest("truncation", "must be disabled or auto")
    if not isinstance((body.reasoning or {}).get("summary"), str | None):
        raise InvalidRequest("reasoning.summary", "must be a string")
    if not isinstance((body.text or {}).get("verbosity"), str | None):
        raise InvalidRequest("text.verbosity", "must be a string")
    conversation = [*await _previous_messages(body, deps), *input_messages(body.input)]
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": [*instructions, *conversation],
        "truncate_prompt_tokens": -1 if body.truncation == "auto" else None,
        "reasoning_effort": (body.reasoning or {}).get("effort"),
        **sampling,
        **_form(body.text),
        **_tools(body),
    }
    try:
        chat = validated(ChatBody, fields)
        warning_header(chat.model_extra or {}, deps.config)  # a translated field that is not supported is refused here
        return conversation, await plan_chat(chat, deps)
    except InvalidRequest as error:
        raise _under_its_own_name(error) from None


def _under_its_own_name(error: InvalidRequest) -> InvalidRequest:
    """Return `error` with the field as the client of this endpoint knows it."""
    for of_chat, own in _OWN_NAMES.items():
        if error.field == of_chat or error.field.startswith(f"{of_chat}."):
            return type(error)(own + error.field.removeprefix(of_chat), error.message)
    if error.field.startswith("tools."):  # a function lies one level higher here
        return type(error)(error.field.replace(".function.", "."), error.message)
    return error


def _check_modes(body: ResponsesBody) -> None:
    if unknown := set(body.include or ()) - _INCLUDABLE:
        shown = ", ".join(sorted(_INCLUDABLE))
        raise InvalidRequest("include", f"{len(unknown)} of its values are unknown; known are {shown}")
    if body.background and body.store is False:
        raise InvalidRequest("background", "needs store, as the answer is fetched later")
    if body.background and body.stream:
        raise InvalidRequest("background", "cannot be combined with stream; fetch the answer when it is done")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "needs stream to be true")


async def _previous_messages(body: InputTokensBody, deps: GatewayDeps) -> list[dict[str, Any]]:
    if body.previous_response_id is None:
        return []
    stored = await deps.responses.get(body.previous_response_id)
    if stored is None:
        message = "there is no such response: it was not stored, or it was kept long enough"
        raise HttpError(ErrorReply(404, message, "previous_response_id", "previous_response_not_found"))
    if stored.response["status"] not in ("completed", "incomplete"):
        raise InvalidRequest("previous_response_id", f"that response is {stored.response['status']}")
    return stored.messages


def _form(text: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `text.format` as `response_format`, which has the schema one level deeper."""
    form = (text or {}).get("format")
    if form is None:
        return {}
    if not isinstance(form, dict):
        raise InvalidRequest("text.format", "must be an object")
    if form.get("type") != "json_schema":
        return {"response_format": form}
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _tools(body: InputTokensBody) -> dict[str, Any]:
    """Return tools as a chat has them, the function one level deeper."""
    tools = []
    for index, tool in enumerate(body.tools or ()):
        if tool.get("type") != "function":
            raise InvalidRequest(f"tools.{index}.type", "only functions that the client runs itself are supported")
        tools.append({"type": "function", "function": {name: tool[name] for name in tool if name != "type"}})
    fields: dict[str, Any] = {"tools": tools}
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
    if body.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    return fields


def _tool_choice(choice: object) -> object:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice
