"""From the token ids of one choice to the pieces that a client sees: text, stop strings, logprobs, finish
reason.

Streamed and whole answers are made of the same pieces, so that they cannot differ.
"""

from collections import deque
from typing import NamedTuple

from pdserve.control.messages import FinishReason, TokenLogprobs
from pdserve.engine.detokenizer import IncrementalDetokenizer
from pdserve.engine.stop_strings import StopChecker
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.answer_part import AnswerPart, Said, merged_parts
from pdserve.gateway.answer_reader import AnswerReader
from pdserve.gateway.generation import GenerationEvent
from pdserve.gateway.generation_plan import GenerationPlan
from pdserve.gateway.prompt_echo import PromptEcho
from pdserve.gateway.shown_token import ShownToken


class ChoicePiece(NamedTuple):
    """What is new of choice `index`: its text, and what that text tells. The numbers count all of it so far.

    With `echo` the first piece begins with the prompt; `prompt_tokens` are there if its logprobs are. The first piece
    also carries the `prompt_logprobs` of all prompt tokens but the first, if they were asked for by that name.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks of a piece
    text: str
    tokens: tuple[ShownToken, ...]
    num_tokens: int
    finish_reason: FinishReason | None
    prompt_tokens: tuple[ShownToken, ...] = ()
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it; None for EOS
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    parts: tuple[AnswerPart, ...] = ()
    num_calls: int = 0
    num_thought_tokens: int = 0


class ChoiceText:
    """The text of one choice as it grows.

    A stop string ends the choice with the token that completes it: later tokens are not shown, counted or
    given logprobs. The token that ends a sequence (EOS, a stop id) is counted and has logprobs, but no text.
    """

    def __init__(self, index: int, plan: GenerationPlan, tokenizer: Tokenizer) -> None:
        self.index = index
        self._plan = plan
        self._tokenizer = tokenizer
        self._sampling = plan.sampling
        self._include_stop = plan.reply.include_stop
        self._detokenizer = IncrementalDetokenizer(tokenizer, plan.prompt_of(index), plan.reply.skip_special_tokens)
        self._stop = StopChecker(plan.sampling.stop, plan.reply.include_stop)
        self._has_stops = bool(plan.sampling.stop)
        self._stop_ids = frozenset(plan.sampling.stop_token_ids)
        self._reader = AnswerReader(plan.reading)
        # Nobody looks at single tokens, and all text is the answer: as most requests are.
        self._is_only_text = not (
            self._has_stops
            or plan.sampling.logprobs is not None
            or plan.reply.return_token_ids
            or plan.reading.calls is not None
            or plan.reading.has_thoughts
        )
        self._parts: list[AnswerPart] = []
        self._has_begun = False
        self._prompt_tokens: tuple[ShownToken, ...] = ()
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._pending: deque[ShownToken] = deque()
        self._num_tokens = 0
        self._num_decoded = 0
        self._num_shown = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has been completed."""
        return self._stop.matched is not None

    def push(self, event: GenerationEvent) -> ChoicePiece | None:
        """Return the piece that `event` completes, None while all of it is held back."""
        if self._is_only_text and self._has_begun and event.finish_reason is None and event.logprobs is None:
            return self._text_piece(event.token_ids)
        text = "" if self._has_begun else self._begin(event)
        is_stop = event.finish_reason is FinishReason.STOP
        last = len(event.token_ids) - 1
        for position, token_id in enumerate(event.token_ids):
            is_end = is_stop and position == last and self._is_hidden_end(token_id)
            logprobs = event.logprobs[position] if event.logprobs is not None else None
            new = self._push_token(token_id, logprobs, has_text=not is_end)
            self._parts += self._reader.push(new, self._num_tokens)
            text += new
            if self._has_stops and self.is_stopped:
                break
        if event.finish_reason is None and not self.is_stopped:
            return self._piece(text, None, None) if text else None
        return self._last_piece(text, event)

    def _text_piece(self, token_ids: tuple[int, ...]) -> ChoicePiece | None:
        self._num_tokens += len(token_ids)
        text = self._detokenizer.push_all(token_ids)
        if not text:
            return None
        return ChoicePiece(self.index, text, (), self._num_tokens, None, parts=(Said(text),))

    def _last_piece(self, text: str, event: GenerationEvent) -> ChoicePiece:
        """Return the piece that ends the choice: `text` and what was held back behind it."""
        finish_reason = event.finish_reason
        if not self.is_stopped:
            rest = self._stop.push(self._detokenizer.finish(), self._can_stop())
            rest += self._stop.finish()
            self._parts += self._reader.push(rest, self._num_tokens)
            text += rest
        if self.is_stopped:
            finish_reason = FinishReason.STOP
        self._parts += self._reader.finish()
        return self._piece(text, finish_reason, self._stop_reason(event, finish_reason))

    def _begin(self, event: GenerationEvent) -> str:
        """Return the prompt's text, if it is to be shown."""
        self._has_begun = True
        if self._plan.reply.prompt_logprobs is not None:
            self._prompt_logprobs = _with_top(event.prompt_logprobs, self._plan.reply.prompt_logprobs)
        if not self._plan.reply.echo:
            return ""
        wanted = self._sampling.logprobs
        logprobs = None if wanted is None else _with_top(event.prompt_logprobs, wanted)
        prompt, text = self._plan.prompt_of(self.index), self._plan.prompt_text_of(self.index)
        echo = PromptEcho.of(prompt, text, logprobs, self._tokenizer, self._plan.reply.skip_special_tokens)
        self._prompt_tokens = echo.tokens
        self._num_decoded += len(echo.text)
        return echo.text

    def _push_token(self, token_id: int, logprobs: TokenLogprobs | None, has_text: bool) -> str:
        self._pending.append(ShownToken(token_id, self._num_decoded, logprobs))
        self._num_tokens += 1
        if not has_text:
            return ""
        decoded = self._detokenizer.push(token_id)
        self._num_decoded += len(decoded)
        return self._stop.push(decoded, self._can_stop()) if self._has_stops else decoded

    def _stop_reason(self, event: GenerationEvent, finish_reason: FinishReason | None) -> str | int | None:
        if self.is_stopped:
            return self._stop.matched
        if finish_reason is FinishReason.STOP and event.token_ids[-1:] and event.token_ids[-1] in self._stop_ids:
            return event.token_ids[-1]
        return None

    def _piece(self, text: str, finish_reason: FinishReason | None, stop_reason: str | int | None) -> ChoicePiece:
        self._num_shown += len(text)
        tokens: list[ShownToken] = []
        while self._pending and (finish_reason is not None or self._pending[0].text_offset < self._num_shown):
            tokens.append(self._pending.popleft())
        prompt_tokens, self._prompt_tokens = self._prompt_tokens, ()
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        parts = merged_parts(self._parts)
        self._parts.clear()
        return ChoicePiece(
            self.index,
            text,
            tuple(tokens),
            self._num_tokens,
            finish_reason,
            prompt_tokens,
            stop_reason,
            prompt_logprobs,
            parts,
            self._reader.num_calls,
            self._reader.num_thought_tokens,
        )

    def _can_stop(self) -> bool:
        return self._num_tokens > self._sampling.min_tokens

    def _is_hidden_end(self, token_id: int) -> bool:
        """Whether the last token has no text of its own; a structured answer may end with a token that has."""
        if token_id in self._sampling.stop_token_ids:
            return not self._include_stop
        return self._sampling.structured_outputs is None or token_id in self._tokenizer.eos_token_ids


def _with_top(logprobs: tuple[TokenLogprobs, ...] | None, num_top: int) -> tuple[TokenLogprobs, ...] | None:
    """Return the same with at most `num_top` alternatives for each token."""
    if logprobs is None:
        return None
    return tuple(TokenLogprobs(each.logprob, each.top[:num_top]) for each in logprobs)
