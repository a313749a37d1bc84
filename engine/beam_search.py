"""Beam search over one prompt, decided step by step from the likeliest continuations of each beam. Pure.

The rules are those of transformers' `generate` (GenerationMixin._beam_search), so that both give the same sequences and
scores: hypotheses are scored by sum of logprobs / length ** length_penalty, length counting the output with its EOS.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pdserve.engine.errors import InvalidRequest
from pdserve.engine.sampling_params import MAX_BRANCHES


class EarlyStopping(StrEnum):
    """When a search with as many finished hypotheses as beams ends, in transformers' terms True, False and "never"."""

    AT_ONCE = "true"
    HEURISTIC = "false"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """What is asked of a beam search. `early_stopping` is True, False or "never"; temperature 0 leaves logits alone.

    Raises:
        InvalidRequest: a value is out of its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_BRANCHES:
            raise InvalidRequest("beam_width", f"must be between 1 and {MAX_BRANCHES}, got {self.beam_width}")
        if self.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature <= 2:
            raise InvalidRequest("temperature", f"must be between 0 and 2, got {self.temperature}")
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequest("early_stopping", f'must be True, False or "never", got {self.early_stopping!r}')

    @property
    def stopping(self) -> EarlyStopping:
        """`early_stopping` by name."""
        return EarlyStopping(str(self.early_stopping).lower())


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Output tokens, the sum of their logprobs, and whether an EOS ended them."""

    token_ids: tuple[int, ...]
    cum_logprob: float
    score: float
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class Beam:
    """An unfinished sequence: output tokens, their logprobs in sum, and which beam of the step before it continues."""

    token_ids: tuple[int, ...]
    cum_logprob: float
    parent: int


class BeamSearch:
    """The beams of one prompt. Owns `beams`, best first, and at most `beam_width` hypotheses, best first."""

    def __init__(self, params: BeamSearchParams, eos_ids: frozenset[int]) -> None:
        self._params = params
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._can_improve = True
        self.beams = [Beam((), 0.0, 0)]
        self.hypotheses: list[Hypothesis] = []
        self.is_finished = False

    @property
    def num_candidates(self) -> int:
        """Continuations to be known of each beam: as many as can be needed if the best of them end."""
        return max(2, 1 + len(self._eos_ids)) * self._params.beam_width

    def advance(self, continuations: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Go one token further; `continuations` has the likeliest (token id, logprob) of each beam, in their order."""
        width, length = self._params.beam_width, len(self.beams[0].token_ids) + 1
        grown = [
            Beam((*beam.token_ids, token_id), beam.cum_logprob + logprob, index)
            for index, (beam, likeliest) in enumerate(zip(self.beams, continuations, strict=True))
            for token_id, logprob in likeliest
        ]
        grown.sort(key=lambda beam: -beam.cum_logprob)
        candidates = grown[: self.num_candidates]
        self._finish([beam for beam in candidates[:width] if self._has_ended(beam)], length)
        self.beams = [beam for beam in candidates if not self._has_ended(beam)][:width]
        is_full = len(self.hypotheses) == width
        if self.beams and is_full:
            self._can_improve &= self._best_possible(length) > self.hypotheses[-1].score
        stops_at_once = is_full and self._params.stopping is EarlyStopping.AT_ONCE
        self.is_finished = not self.beams or not self._can_improve or stops_at_once

    def _finish(self, ended: list[Beam], length: int) -> None:
        """Keep the best hypotheses of those there are and those that have just ended."""
        penalty = length**self._params.length_penalty
        new = [
            Hypothesis(
                beam.token_ids, beam.cum_logprob, beam.cum_logprob / penalty, beam.token_ids[-1] in self._eos_ids
            )
            for beam in ended
        ]
        best = sorted([*self.hypotheses, *new], key=lambda hypothesis: -hypothesis.score)
        self.hypotheses = best[: self._params.beam_width]

    def _has_ended(self, beam: Beam) -> bool:
        return beam.token_ids[-1] in self._eos_ids or len(beam.token_ids) >= self._params.max_tokens

    def _best_possible(self, length: int) -> float:
        """The score that the best beam is taken to be able to reach."""
        is_hopeful = self._params.stopping is EarlyStopping.NEVER and self._params.length_penalty > 0
        reached: int = self._params.max_tokens if is_hopeful else length
        possible: float = self.beams[0].cum_logprob / reached**self._params.length_penalty
        return possible
