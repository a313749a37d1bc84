"""The JSON of answers, whole and in chunks, in the shapes of the two endpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdserve.control.messages import FinishReason
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.answer_part import AnswerContent, AnswerPart, CallArguments, CallOpened, Said, Thought
from pdserve.gateway.answer_reader import NamedCall
from pdserve.gateway.call_ids import call_id
from pdserve.gateway.choice_text import ChoicePiece
from pdserve.gateway.generation_plan import Endpoint, GenerationPlan
from pdserve.gateway.logprob_format import chat_logprobs, completion_logprobs, prompt_logprobs
from pdserve.gateway.reply_types import ChatLogprobsReply, UsageReply


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole request; each prompt is counted once, whatever n is."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_thought_tokens: int | None = None  # None: thoughts are not told apart

    def body(self) -> UsageReply:
        """Return OpenAI's usage object."""
        usage: UsageReply = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        if self.num_thought_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_thought_tokens}
        return usage


class ReplyShape(Protocol):
    """How one endpoint shows choices."""

    object_name: str
    chunk_name: str

    def whole_choice(self, piece: ChoicePiece) -> dict[str, Any]:
        """Return a finished choice, all of it in one piece."""

    def chunk_choices(self, piece: ChoicePiece, is_first: bool) -> list[dict[str, Any]]:
        """Return the entries of `choices`, one for each chunk that shows `piece`."""


def reply_shape(plan: GenerationPlan, tokenizer: Tokenizer) -> ReplyShape:
    """Return the shape of the endpoint that `plan` came to."""
    if plan.endpoint is Endpoint.CHAT:
        return ChatShape(plan, tokenizer)
    return CompletionShape(plan, tokenizer)


def envelope(plan: GenerationPlan, object_name: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what surrounds choices in every reply and chunk."""
    return {
        "id": plan.response_id,
        "object": object_name,
        "created": plan.created,
        "model": plan.model,
        "choices": list(choices),
    }


def merged(pieces: Sequence[ChoicePiece]) -> ChoicePiece:
    """Return all pieces of a finished choice as one."""
    last = pieces[-1]
    return ChoicePiece(
        last.index,
        "".join([piece.text for piece in pieces]),
        tuple(token for piece in pieces for token in piece.tokens),
        last.num_tokens,
        last.finish_reason,
        tuple(token for piece in pieces for token in piece.prompt_tokens),
        last.stop_reason,
        next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None),
        tuple(part for piece in pieces for part in piece.parts),
        last.num_calls,
        last.num_thought_tokens,
    )


def scored_prompt(plan: GenerationPlan, piece: ChoicePiece, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return `prompt_logprobs` of a finished choice, if they were asked for."""
    if piece.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs(plan.prompt_of(piece.index), piece.prompt_logprobs, tokenizer)}


def chat_finish_reason(plan: GenerationPlan, piece: ChoicePiece) -> str | None:
    """Return why a finished choice ended, as OpenAI says it: a named call is no reason, other calls are."""
    is_called = piece.num_calls > 0 and not isinstance(plan.reading.calls, NamedCall)
    return "tool_calls" if is_called and piece.finish_reason is FinishReason.STOP else piece.finish_reason


class CompletionShape:
    """`text` and flat logprobs; the last text and the finish reason share a chunk."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, plan: GenerationPlan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer

    def whole_choice(self, piece: ChoicePiece) -> dict[str, Any]:
        return {**self._choice(piece, is_first=True), **scored_prompt(self._plan, piece, self._tokenizer)}

    def chunk_choices(self, piece: ChoicePiece, is_first: bool) -> list[dict[str, Any]]:
        return [self._choice(piece, is_first)]

    def _choice(self, piece: ChoicePiece, is_first: bool) -> dict[str, Any]:
        has_logprobs = self._plan.sampling.logprobs is not None
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": completion_logprobs(piece.prompt_tokens + piece.tokens, self._tokenizer)
            if has_logprobs
            else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **_token_ids(self._plan, piece, is_first),
        }


class ChatShape:
    """`message` or `delta`; a stream opens with the role and ends with an empty delta, per choice."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, plan: GenerationPlan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer

    def whole_choice(self, piece: ChoicePiece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "message": {"role": "assistant", **self._message(piece), "refusal": None},
            "logprobs": self._logprobs(piece),
            "finish_reason": chat_finish_reason(self._plan, piece),
            "stop_reason": piece.stop_reason,
            **_token_ids(self._plan, piece, is_first=True),
        }

    def chunk_choices(self, piece: ChoicePiece, is_first: bool) -> list[dict[str, Any]]:
        choices = []
        if is_first:
            content = "" if self._plan.reading.calls is None else None
            choices.append(self._delta(piece, {"role": "assistant", "content": content}))
        deltas = [self._part(piece, part) for part in piece.parts]
        if deltas or piece.tokens:
            first = self._delta(piece, deltas[0] if deltas else {})
            first["logprobs"] = self._logprobs(piece)
            choices.append({**first, **_token_ids(self._plan, piece, is_first)})
            choices += [self._delta(piece, delta) for delta in deltas[1:]]
        if piece.finish_reason is not None:
            if deltas or not choices:
                choices.append(self._delta(piece, {}))
            reason = chat_finish_reason(self._plan, piece)
            choices[-1] |= {"finish_reason": reason, "stop_reason": piece.stop_reason}
        return choices

    def _message(self, piece: ChoicePiece) -> dict[str, Any]:
        content = AnswerContent.of(piece.parts)
        message: dict[str, Any] = {"content": content.text or (None if content.calls else "")}
        if self._plan.reading.has_thoughts:
            message |= {"reasoning_content": content.thoughts or None, "reasoning": content.thoughts or None}
        if content.calls:
            message["tool_calls"] = [
                {**self._call(piece, call.index), "function": {"name": call.name, "arguments": call.arguments}}
                for call in content.calls
            ]
        return message

    def _part(self, piece: ChoicePiece, part: AnswerPart) -> dict[str, Any]:
        match part:
            case Said(text):
                return {"content": text}
            case Thought(text):
                return {"reasoning_content": text, "reasoning": text}
            case CallOpened(index, name):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, **self._call(piece, index), "function": function}]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _call(self, piece: ChoicePiece, index: int) -> dict[str, Any]:
        return {"id": call_id(self._plan, piece.index, index), "type": "function"}

    def _delta(self, piece: ChoicePiece, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, piece: ChoicePiece) -> ChatLogprobsReply | None:
        has_logprobs = self._plan.sampling.logprobs is not None
        return chat_logprobs(piece.tokens, self._tokenizer) if has_logprobs else None


def _token_ids(plan: GenerationPlan, piece: ChoicePiece, is_first: bool) -> dict[str, Any]:
    if not plan.reply.return_token_ids:
        return {}
    fields: dict[str, Any] = {"token_ids": [token.token_id for token in piece.tokens]}
    if is_first:
        fields["prompt_token_ids"] = list(plan.prompt_of(piece.index))
    return fields
