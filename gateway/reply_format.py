"""How one endpoint answers: the body of a whole answer, and the events of a streamed one."""

from collections.abc import Sequence
from typing import Any, Protocol

from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.answer_part import Said
from pdserve.gateway.choice_text import ChoicePiece
from pdserve.gateway.error_responses import ErrorReply
from pdserve.gateway.generation_plan import Endpoint, GenerationPlan
from pdserve.gateway.reply_shapes import envelope, reply_shape, scored_prompt
from pdserve.gateway.route_format import asked_route
from pdserve.gateway.running_choices import RunningChoices
from pdserve.gateway.stream_event import END_OF_STREAM, AnyEvent, StreamEvent
from pdserve.gateway.text_frame import TextFrame


class ReplyFormat(Protocol):
    """The answer to one request, in the protocol that its client speaks. Keeps what a stream has said so far."""

    def whole(self, choices: Sequence[ChoicePiece], running: RunningChoices) -> dict[str, Any]:
        """Return the body of a finished answer; each choice is one piece."""

    def opening(self, running: RunningChoices) -> Sequence[AnyEvent]:
        """Return the events before the first piece."""

    def events(self, piece: ChoicePiece, running: RunningChoices) -> Sequence[AnyEvent]:
        """Return the events that show `piece`."""

    def closing(self, running: RunningChoices) -> Sequence[AnyEvent]:
        """Return the events after the last piece."""

    def failure(self, reply: ErrorReply) -> Sequence[AnyEvent]:
        """Return the events that end a stream which cannot go on."""


class OpenAIFormat:
    """Completions and chat completions: choices in envelopes, or an error, then `[DONE]`."""

    def __init__(self, plan: GenerationPlan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._shape = reply_shape(plan, tokenizer)
        self._frames: dict[int, TextFrame] = {}  # by choice, once its first piece is shown
        reply = plan.reply
        self._is_framed = plan.sampling.logprobs is None and not (reply.return_token_ids or reply.continuous_usage)

    def whole(self, choices: Sequence[ChoicePiece], running: RunningChoices) -> dict[str, Any]:
        shown = [self._shape.whole_choice(piece) for piece in choices]
        body = envelope(self._plan, self._shape.object_name, shown)
        body["usage"] = running.usage().body()
        if self._plan.endpoint is Endpoint.CHAT:
            body |= scored_prompt(self._plan, choices[0], self._tokenizer)
        return body | asked_route(self._plan, running)

    def opening(self, running: RunningChoices) -> Sequence[AnyEvent]:
        return ()

    def events(self, piece: ChoicePiece, running: RunningChoices) -> Sequence[AnyEvent]:
        frame = self._frames.get(piece.index)
        if frame is not None and self._is_framed and piece.finish_reason is None and len(piece.parts) == 1:
            (part,) = piece.parts
            if isinstance(part, Said) and not piece.prompt_tokens:
                return (frame.around(part.text),)
        events = self._chunks(piece, running, is_first=frame is None)
        if frame is None:
            place = ChoicePiece(piece.index, TextFrame.PLACE, (), 0, None, parts=(Said(TextFrame.PLACE),))
            self._frames[piece.index] = TextFrame.of(*self._chunks(place, running, is_first=False))
        return events

    def _chunks(self, piece: ChoicePiece, running: RunningChoices, is_first: bool) -> list[StreamEvent]:
        usage: dict[str, Any] = {}
        if self._plan.reply.continuous_usage:
            usage = {"usage": running.usage().body()}
        elif self._plan.reply.include_usage:
            usage = {"usage": None}
        choices = self._shape.chunk_choices(piece, is_first)
        return [StreamEvent({**envelope(self._plan, self._shape.chunk_name, [choice]), **usage}) for choice in choices]

    def closing(self, running: RunningChoices) -> Sequence[AnyEvent]:
        last = envelope(self._plan, self._shape.chunk_name, ())
        if self._plan.reply.include_usage:
            last["usage"] = running.usage().body()
        last |= asked_route(self._plan, running)
        has_last = self._plan.reply.include_usage or self._plan.reply.return_route_info
        return [*([StreamEvent(last)] if has_last else []), END_OF_STREAM]

    def failure(self, reply: ErrorReply) -> Sequence[AnyEvent]:
        return [StreamEvent(reply.body()), END_OF_STREAM]
