"""Answers as the Responses API has them: output items, typed events with sequence numbers."""

from collections.abc import Sequence
from typing import Any

import orjson

from pdserve.control.messages import FinishReason
from pdserve.control.response_store import StoredResponse
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.answer_part import AnswerContent, AnswerPart
from pdserve.gateway.call_ids import call_id
from pdserve.gateway.choice_text import ChoicePiece
from pdserve.gateway.error_responses import ErrorReply
from pdserve.gateway.generation_plan import GenerationPlan
from pdserve.gateway.logprob_format import chat_logprobs
from pdserve.gateway.other_reply_types import ResponseUsage
from pdserve.gateway.reply_shapes import Usage
from pdserve.gateway.responses_items import Event, ResponseItems
from pdserve.gateway.responses_schema import ResponsesBody
from pdserve.gateway.route_format import asked_route
from pdserve.gateway.running_choices import RunningChoices
from pdserve.gateway.stream_event import StreamEvent


class ResponsesFormat:
    """One response. `final` is what is stored, once the answer is complete."""

    def __init__(self, plan: GenerationPlan, body: ResponsesBody, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._body = body
        self._items = ResponseItems(plan)
        self._parts: list[AnswerPart] = []
        self._last: ChoicePiece | None = None
        self._num_events = 0
        self.final: StoredResponse | None = None

    @property
    def is_background(self) -> bool:
        """Whether the client is answered before the generation."""
        return bool(self._body.background)

    @property
    def is_stored(self) -> bool:
        """Whether it can be fetched and continued later."""
        return self._body.store is not False

    def whole(self, choices: Sequence[ChoicePiece], running: RunningChoices) -> dict[str, Any]:
        self._tell(choices[0])
        return self._finish(running)[1]

    def opening(self, running: RunningChoices) -> list[StreamEvent]:
        return [
            self._event("response.created", response=self.shown("in_progress")),
            self._event("response.in_progress", response=self.shown("in_progress")),
        ]

    def events(self, piece: ChoicePiece, running: RunningChoices) -> list[StreamEvent]:
        return [self._event(name, **fields) for name, fields in self._tell(piece)]

    def closing(self, running: RunningChoices) -> list[StreamEvent]:
        events, response = self._finish(running)
        return [
            *(self._event(name, **fields) for name, fields in events),
            self._event(f"response.{response['status']}", response=response),
        ]

    def failure(self, reply: ErrorReply) -> list[StreamEvent]:
        return [self._event("response.failed", response=self.failed(reply))]

    def failed(self, reply: ErrorReply) -> dict[str, Any]:
        """Return the response of a generation that cannot go on."""
        error = {"code": reply.code or "server_error", "message": reply.message}
        return {**self.shown("failed"), "error": error}

    def shown(self, status: str) -> dict[str, Any]:
        """Return the response object, without an answer."""
        body, sampling = self._body, self._plan.sampling
        return {
            "id": self._plan.response_id,
            "object": "response",
            "created_at": self._plan.created,
            "status": status,
            "background": bool(body.background),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._plan.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_p": sampling.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        }

    def _tell(self, piece: ChoicePiece) -> list[Event]:
        self._last = piece
        self._parts += piece.parts
        if self._plan.sampling.logprobs is not None:
            self._items.add_logprobs(chat_logprobs(piece.tokens, self._tokenizer)["content"])
        return [event for part in piece.parts for event in self._items.push(part)]

    def _finish(self, running: RunningChoices) -> tuple[list[Event], dict[str, Any]]:
        assert self._last is not None
        is_cut = self._last.finish_reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        events = self._items.finish(status)
        response = {
            **self.shown(status),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items.finished,
            "usage": _usage(running.usage()),
            **asked_route(self._plan, running),
        }
        self.final = StoredResponse(response, [*self._plan.conversation, self._answer()])
        return events, response

    def _answer(self) -> dict[str, Any]:
        """Return the answer as a message of the chat that may go on; calls that were cut are left out."""
        content = AnswerContent.of(self._parts)
        calls = [
            {
                "id": call_id(self._plan, 0, call.index),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in content.calls
            if _is_json(call.arguments)
        ]
        return {"role": "assistant", "content": content.text, **({"tool_calls": calls} if calls else {})}

    def _event(self, kind: str, /, **fields: object) -> StreamEvent:
        number = self._num_events
        self._num_events += 1
        return StreamEvent({"type": kind, "sequence_number": number, **fields}, kind)


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def _usage(usage: Usage) -> ResponseUsage:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_thought_tokens or 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }
