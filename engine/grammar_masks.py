"""The masks of structured answers, computed in a thread of their own while the model computes the logits.

A mask is a function of the request's form and of the tokens emitted so far, and is asked for by both: whatever happened
to a sequence before (preemption, migration, a draft that was refused) needs no word here.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.errors import GrammarFailed, ModelError
from pdserve.engine.grammar_compiler import GrammarCompiler
from pdserve.engine.grammar_state import GrammarState
from pdserve.engine.grammar_thread import grammar_thread
from pdserve.engine.scheduled_batch import ScheduledSpan
from pdserve.engine.step_output import SampledToken
from pdserve.engine.structured_outputs import StructuredOutputsParams

T = TypeVar("T")

_MAX_STATES = 1024  # a state that was dropped is made again from the emitted tokens
_JOIN_TIMEOUT_S = 30.0

Masks = list[Tensor]  # each [num_token_ids] bool, True where a token is banned


@dataclass(slots=True)
class _Followed:
    """A sequence's state, and the mask there once it is known."""

    state: GrammarState
    banned: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Pending:
    """The masks of one span, from the position of its own token on."""

    output_position: int
    masks: "Future[Masks]"


class GrammarMasks:
    """Follows every structured sequence of an engine; its public methods are called from the engine's thread only.

    A step: `start` before the forward pass, `banned` after it for each row, `accept` with what was sampled. The states
    are touched by the worker alone.
    """

    def __init__(
        self, open_compiler: Callable[[], GrammarCompiler], num_token_ids: int, eos_ids: frozenset[int]
    ) -> None:
        self._open_compiler = open_compiler
        self._num_token_ids = num_token_ids
        self._eos_ids = eos_ids
        self._compiler: GrammarCompiler | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._states: OrderedDict[str, _Followed] = OrderedDict()
        self._pending: dict[str, _Pending] = {}

    def prepare(self, params: StructuredOutputsParams) -> None:
        """Compile ahead, while the prompt is computed; a failure shows when a mask is asked for."""
        self._pool().submit(self._compile_ahead, params)

    def start(self, spans: Sequence[ScheduledSpan]) -> None:
        """Begin to compute the masks of the spans that sample a structured answer, those along their drafts too."""
        self._pending.clear()
        for span in spans:
            if span.sampling is not None and span.sampling.structured_outputs is not None:
                masks = self._pool().submit(
                    self._masks,
                    span.seq_id,
                    span.sampling.structured_outputs,
                    span.output_history,
                    span.draft_token_ids,
                )
                self._pending[span.seq_id] = _Pending(span.output_position, masks)

    def banned(self, span: ScheduledSpan) -> Tensor:  # [num_token_ids] bool
        """Return which tokens may not follow, as asked for by `start`; `span` may stand after accepted drafts.

        Raises:
            GrammarFailed: the answer cannot go on in its grammar.
        """
        pending = self._pending[span.seq_id]
        masks = self._joined(pending.masks)
        num_accepted = span.output_position - pending.output_position
        if num_accepted >= len(masks):
            raise GrammarFailed("the grammar is too complex to go on with")
        return masks[num_accepted]

    def accept(self, spans: Sequence[ScheduledSpan], sampled: Sequence[SampledToken]) -> list[SampledToken]:
        """Return `sampled` with those marked that complete their grammar; the next masks are begun at once."""
        accepted = [
            (span.seq_id, token.token_id)
            for span, token in zip(spans, sampled, strict=True)
            if span.seq_id in self._pending and token.token_id is not None
        ]
        if not accepted:
            return list(sampled)
        over = self._joined(self._pool().submit(self._accept, accepted))
        self._pool().submit(self._look_ahead, [seq_id for seq_id, _ in accepted if seq_id not in over])
        return [
            replace(token, completes_grammar=True) if span.seq_id in over else token
            for span, token in zip(spans, sampled, strict=True)
        ]

    def forget(self, seq_id: str) -> None:
        """Drop what is kept of a sequence that has ended."""
        if self._thread is not None:
            self._thread.submit(self._states.pop, seq_id, None)

    def check(self, params: StructuredOutputsParams) -> None:
        """Compile now, and wait for it.

        Raises:
            GrammarFailed: it cannot be compiled, or no answer can have this form.
        """
        self._joined(self._pool().submit(self._state, params))

    def _pool(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = grammar_thread("grammar")
        return self._thread

    def _joined(self, future: "Future[T]") -> T:
        try:
            return future.result(_JOIN_TIMEOUT_S)
        except TimeoutError:
            raise GrammarFailed(f"its mask took more than {_JOIN_TIMEOUT_S:g} s") from None

    # In the worker from here on.

    def _state(self, params: StructuredOutputsParams) -> GrammarState:
        if self._compiler is None:
            try:
                self._compiler = self._open_compiler()
            except ModelError as error:
                raise GrammarFailed(f"this model's tokenizer cannot be read: {error}") from error
        return self._compiler.state(params)

    def _compile_ahead(self, params: StructuredOutputsParams) -> None:
        with suppress(GrammarFailed):  # said when a mask is asked for
            self._state(params)

    def _followed(self, seq_id: str, params: StructuredOutputsParams) -> _Followed:
        followed = self._states.get(seq_id)
        if followed is None:
            followed = self._states[seq_id] = _Followed(self._state(params))
            if len(self._states) > _MAX_STATES:
                self._states.popitem(last=False)
        self._states.move_to_end(seq_id)
        return followed

    def _masks(
        self, seq_id: str, params: StructuredOutputsParams, history: tuple[int, ...], draft: tuple[int, ...]
    ) -> Masks:
        try:
            return self._masks_after(seq_id, params, history, draft)
        except GrammarFailed:
            self._states.pop(seq_id, None)  # a failed matcher never recovers
            if self._compiler is None:
                raise
        # Once more on its own: what others with the same grammar have used up must not end this one.
        self._compiler.drop(params)
        try:
            return self._masks_after(seq_id, params, history, draft)
        except GrammarFailed:
            self._states.pop(seq_id, None)
            raise

    def _masks_after(
        self, seq_id: str, params: StructuredOutputsParams, history: tuple[int, ...], draft: tuple[int, ...]
    ) -> Masks:
        followed = self._followed(seq_id, params)
        if list(history) != followed.state.token_ids:
            followed.banned = None
            followed.state.move_to(history)
        if draft:
            return [self._as_banned(mask) for mask in followed.state.masks(draft)]
        if followed.banned is None:
            followed.banned = self._as_banned(followed.state.mask())
        return [followed.banned]

    def _accept(self, sampled: Sequence[tuple[str, int]]) -> set[str]:
        """Go one token on in each sequence; return those whose answers are complete and cannot grow."""
        over = set()
        for seq_id, token_id in sampled:
            followed = self._states.get(seq_id)
            if token_id in self._eos_ids:
                over.add(seq_id)
            elif followed is not None:
                followed.banned = None
                with suppress(GrammarFailed):  # said when the next mask is asked for
                    followed.state.accept(token_id)
                    if followed.state.is_over and followed.state.is_complete:
                        over.add(seq_id)
        return over

    def _look_ahead(self, seq_ids: Sequence[str]) -> None:
        for seq_id in seq_ids:
            followed = self._states.get(seq_id)
            if followed is not None:
                with suppress(GrammarFailed):
                    followed.banned = self._as_banned(followed.state.mask())

    def _as_banned(self, mask: bytes) -> Tensor:  # [num_token_ids] bool
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")[: self._num_token_ids]
        banned = np.ones(self._num_token_ids, dtype=np.bool_)
        banned[: bits.size] = bits == 0
        return torch.from_numpy(banned)
