"""Chunks of tokens, from several nodes and attempts, merged into one output without gap or repeat. Pure."""

from pdserve.control.messages import TokenChunk
from pdserve.gateway.errors import ProtocolViolation
from pdserve.gateway.generation import GenerationEvent


class TokenMerge:
    """Owns the output so far and the chunks that arrived before their turn.

    Tokens are a function of (seed, position), so a position that arrives twice arrives alike: the first is
    kept.
    """

    def __init__(self, max_tokens: int, *, has_logprobs: bool, num_prompt_logprobs: int | None = None) -> None:
        self._max_tokens = max_tokens
        self._has_logprobs = has_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs  # that must come with the first token; None: not asked for
        self._token_ids: list[int] = []
        self._early: list[TokenChunk] = []
        self.is_finished = False  # the last token is out

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the output so far."""
        return tuple(self._token_ids)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the output has so far."""
        return len(self._token_ids)

    @property
    def has_gap(self) -> bool:
        """Whether a later chunk waits for an earlier one."""
        return bool(self._early)

    def add(self, chunk: TokenChunk) -> tuple[GenerationEvent, ...]:
        """Take `chunk` in and return what can be said now, in order.

        Raises:
            ProtocolViolation: it cannot belong to this output.
        """
        if (event := self._next_token(chunk)) is not None:
            return (event,)
        self._check(chunk)
        if not self._early and chunk.start <= len(self._token_ids):
            event = self._emit(chunk)
            return () if event is None else (event,)
        self._early.append(chunk)
        self._early.sort(key=lambda early: early.start)
        events = []
        while self._early and self._early[0].start <= self.num_tokens:
            if (event := self._emit(self._early.pop(0))) is not None:
                events.append(event)
        return tuple(events)

    def restart(self) -> None:
        """Forget the chunks that wait: their attempt is over and the next one says them again."""
        self._early.clear()

    def _next_token(self, chunk: TokenChunk) -> GenerationEvent | None:
        """Take in one token in its turn that has nothing to be checked, as nearly all are; None for all others."""
        start, token_ids = len(self._token_ids), chunk.token_ids
        is_plain = chunk.logprobs is None and not self._has_logprobs and chunk.finish_reason is None
        if not is_plain or chunk.start != start or len(token_ids) != 1 or not 0 < start < self._max_tokens:
            return None
        if self._early or self.is_finished:
            return None
        self._token_ids += token_ids
        return GenerationEvent(start, token_ids, None, None)

    def _check(self, chunk: TokenChunk) -> None:
        end = chunk.start + len(chunk.token_ids)
        if end > self._max_tokens:
            raise ProtocolViolation(f"tokens up to {end} where at most {self._max_tokens} were asked for")
        if chunk.logprobs is not None and len(chunk.logprobs) != len(chunk.token_ids):
            raise ProtocolViolation(f"{len(chunk.logprobs)} logprobs for {len(chunk.token_ids)} tokens")
        if self._has_logprobs and chunk.token_ids and chunk.logprobs is None:
            raise ProtocolViolation("tokens without the logprobs that were asked for")
        if chunk.start == 0 and self._lacks_prompt_logprobs(chunk):
            raise ProtocolViolation("a first token without the logprobs of the prompt that were asked for")
        if chunk.finish_reason is not None and end < self.num_tokens:
            raise ProtocolViolation(f"an end at {end} after {self.num_tokens} tokens")

    def _lacks_prompt_logprobs(self, chunk: TokenChunk) -> bool:
        wanted = self._num_prompt_logprobs
        return wanted is not None and (chunk.prompt_logprobs is None or len(chunk.prompt_logprobs) != wanted)

    def _emit(self, chunk: TokenChunk) -> GenerationEvent | None:
        if self.is_finished:
            return None
        start = self.num_tokens
        skip = start - chunk.start
        token_ids = chunk.token_ids[skip:]
        logprobs = chunk.logprobs[skip:] if self._has_logprobs and chunk.logprobs is not None else None
        finish_reason = chunk.finish_reason if skip <= len(chunk.token_ids) else None
        self._token_ids += token_ids
        self.is_finished = finish_reason is not None
        if not token_ids and finish_reason is None:
            return None
        prompt_logprobs = chunk.prompt_logprobs if start == 0 and self._num_prompt_logprobs is not None else None
        return GenerationEvent(start, token_ids, logprobs, finish_reason, prompt_logprobs)
