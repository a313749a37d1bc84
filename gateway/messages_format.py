"""Answers as Anthropic's clients read them: content blocks, named events, errors in their envelope."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from pdserve.control.messages import FinishReason
from pdserve.gateway.answer_part import (
    AnswerPart,
    CallArguments,
    CallOpened,
    Said,
    Thought,
    WholeCall,
    whole_parts,
)
from pdserve.gateway.call_ids import call_id
from pdserve.gateway.choice_text import ChoicePiece
from pdserve.gateway.error_responses import ErrorReply
from pdserve.gateway.generation_plan import GenerationPlan
from pdserve.gateway.other_reply_types import MessageReply, MessageUsage, TextBlock, ThinkingBlock, ToolUseBlock
from pdserve.gateway.reply_shapes import Usage
from pdserve.gateway.route_format import asked_route
from pdserve.gateway.running_choices import RunningChoices
from pdserve.gateway.stream_event import StreamEvent

ANTHROPIC_PATHS = "/v1/messages"
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_EMPTY_BLOCKS: dict[type[AnswerPart], dict[str, Any]] = {
    Said: {"type": "text", "text": ""},
    Thought: {"type": "thinking", "thinking": "", "signature": ""},
}


def anthropic_error(reply: ErrorReply) -> dict[str, Any]:
    """Return the error envelope of Anthropic's protocol; the field that is wrong is named in the message."""
    kind = "invalid_request_error" if reply.status < 500 else "api_error"
    named = reply.param is None or reply.message.startswith(reply.param)
    message = reply.message if named else f"{reply.param}: {reply.message}"
    return {"type": "error", "error": {"type": _ERROR_TYPES.get(reply.status, kind), "message": message}}


class MessagesFormat:
    """One message of blocks: thoughts, text, calls of tools."""

    def __init__(self, plan: GenerationPlan) -> None:
        self._plan = plan
        self._last: ChoicePiece | None = None
        self._num_blocks = 0  # begun
        self._open: type[AnswerPart] | None = None  # what the open block shows

    def whole(self, choices: Sequence[ChoicePiece], running: RunningChoices) -> dict[str, Any]:
        piece = choices[0]
        content = [self._whole_block(part) for part in whole_parts(piece.parts)]
        return {**self._message(content, _usage(running.usage())), **_stop(piece), **asked_route(self._plan, running)}

    def opening(self, running: RunningChoices) -> list[StreamEvent]:
        return [_event("message_start", message=self._message([], _usage(running.usage())))]

    def events(self, piece: ChoicePiece, running: RunningChoices) -> list[StreamEvent]:
        self._last = piece
        return [event for part in piece.parts for event in self._part(part)]

    def closing(self, running: RunningChoices) -> list[StreamEvent]:
        assert self._last is not None
        return [
            *self._close(),
            _event(
                "message_delta",
                delta=_stop(self._last),
                usage=_usage(running.usage()),
                **asked_route(self._plan, running),
            ),
            _event("message_stop"),
        ]

    def failure(self, reply: ErrorReply) -> list[StreamEvent]:
        return [StreamEvent(anthropic_error(reply), "error")]

    def _part(self, part: AnswerPart) -> list[StreamEvent]:
        """Return the events of one part; a block ends where something else begins."""
        match part:
            case CallOpened(index, name):
                return [*self._close(), self._begin(CallArguments, self._call(index, name, {}))]
            case CallArguments(_, text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
            case Said(text):
                delta = {"type": "text_delta", "text": text}
            case Thought(text):
                delta = {"type": "thinking_delta", "thinking": text}
        if self._open is type(part):
            return [self._delta(delta)]
        return [*self._close(), self._begin(type(part), _EMPTY_BLOCKS[type(part)]), self._delta(delta)]

    def _begin(self, shown: type[AnswerPart], block: Mapping[str, Any]) -> StreamEvent:
        self._open = shown
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, str]) -> StreamEvent:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _close(self) -> list[StreamEvent]:
        if self._open is None:
            return []
        self._open = None
        return [_event("content_block_stop", index=self._num_blocks - 1)]

    def _whole_block(self, part: Said | Thought | WholeCall) -> TextBlock | ThinkingBlock | ToolUseBlock:
        match part:
            case Said(text):
                return {"type": "text", "text": text}
            case Thought(text):
                return {"type": "thinking", "thinking": text, "signature": ""}
            case WholeCall(index, name, arguments):
                return self._call(index, name, _input(arguments))

    def _call(self, index: int, name: str, given: Any) -> ToolUseBlock:
        return {"type": "tool_use", "id": call_id(self._plan, 0, index, "toolu_"), "name": name, "input": given}

    def _message(self, content: list[TextBlock | ThinkingBlock | ToolUseBlock], usage: MessageUsage) -> MessageReply:
        return {
            "id": self._plan.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._plan.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _input(arguments: str) -> Any:
    """Return what is shown as the object `arguments`; one that was cut is shown empty."""
    try:
        is_object = isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return orjson.Fragment(arguments) if is_object else {}


def _event(name: str, **fields: object) -> StreamEvent:
    return StreamEvent({"type": name, **fields}, name)


def _stop(piece: ChoicePiece) -> dict[str, str | None]:
    is_sequence = isinstance(piece.stop_reason, str) and not piece.num_calls
    if piece.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    else:
        reason = "tool_use" if piece.num_calls else "stop_sequence" if is_sequence else "end_turn"
    return {"stop_reason": reason, "stop_sequence": str(piece.stop_reason) if is_sequence else None}


def _usage(usage: Usage) -> MessageUsage:
    """Anthropic counts cached tokens apart from the other tokens of the prompt."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
    }
