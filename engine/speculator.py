"""Speculative decoding in one engine: gets drafts for decoding sequences, gives them room, learns from verification."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pdserve.engine.config import EngineConfig
from pdserve.engine.draft_model import DraftModelDrafter
from pdserve.engine.drafts import Drafter, DraftRequest
from pdserve.engine.ngram_drafter import NgramDrafter
from pdserve.engine.scheduled_batch import ScheduledBatch, ScheduledSpan
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.speculation_controller import DraftLength, SpeculationController, StepCost
from pdserve.engine.speculative_config import SpeculativeConfig, SpeculativeMethod
from pdserve.engine.verification import VerifiedStep


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """What speculation has done so far: tokens drafted and verified, and those of them that were right."""

    method: str
    num_drafted: int
    num_accepted: int


@dataclass(slots=True)
class _Drafted:
    """A sequence that has been drafted for; ids may come again, so the sequence itself is compared."""

    sequence: Sequence
    length: DraftLength


class Speculator:
    """Owns the drafter and what is known of each drafted sequence; both are freed with the sequence, at the next step.

    Blocks for drafts are reserved only where nobody must give way, and go back after verification.
    """

    def __init__(self, config: SpeculativeConfig, drafter: Drafter, scheduler: Scheduler, step_budget: int) -> None:
        self._config = config
        self._drafter = drafter
        self._scheduler = scheduler
        self._step_budget = step_budget
        self._controller = SpeculationController()
        self._drafted: dict[str, _Drafted] = {}
        self._is_catching_up = False
        self._num_drafted = 0
        self._num_accepted = 0

    @property
    def counts(self) -> SpeculationCounts:
        """What has been drafted and accepted so far."""
        return SpeculationCounts(self._drafter.method, self._num_drafted, self._num_accepted)

    def with_drafts(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Return the batch with drafts after its decoding spans, where they are expected to pay."""
        self.forget_ended()
        self._is_catching_up = False
        num_decoding = sum(_is_decoding(span) for span in batch.spans)
        if self._config.adaptive and not self._controller.should_speculate(num_decoding):
            return batch
        requests = list(self._requests(batch))
        if not requests:
            return batch
        drafts = self._drafter.propose(requests)
        self._is_catching_up = drafts.is_catching_up
        proposed = {
            request.span.seq_id: token_ids
            for request, token_ids in zip(requests, drafts.token_ids, strict=True)
            if token_ids
        }
        spans = tuple(
            self._scheduler.with_drafts(span, proposed[span.seq_id]) if span.seq_id in proposed else span
            for span in batch.spans
        )
        return replace(batch, spans=spans)

    def settle(self, batch: ScheduledBatch, verified: VerifiedStep, seconds: float) -> None:
        """Give unused blocks back once the scheduler has taken the step in, and learn from it."""
        num_tokens: dict[str, int] = {}
        for span in verified.batch.spans:
            num_tokens[span.seq_id] = num_tokens.get(span.seq_id, 0) + 1
        for span in batch.spans:
            if span.draft_token_ids:
                self._scheduler.release_drafts(span.seq_id)
                num_drafted, num_accepted = len(span.draft_token_ids), num_tokens[span.seq_id] - 1
                self._drafted[span.seq_id].length.record(num_drafted, num_accepted)
                self._num_drafted += num_drafted
                self._num_accepted += num_accepted
        if not self._is_catching_up and all(map(_is_decoding, batch.spans)):
            had_drafts = any(span.draft_token_ids for span in batch.spans)
            self._controller.record(StepCost(len(batch.spans), len(verified.tokens), seconds), had_drafts=had_drafts)
        self.forget_ended()

    def interrupt(self) -> None:
        """Give up what the drafter is computing. From any thread."""
        self._drafter.interrupt()

    def forget_ended(self) -> None:
        """Free what is kept for sequences that the scheduler no longer has."""
        for seq_id, drafted in list(self._drafted.items()):
            if self._scheduler.sequence(seq_id) is not drafted.sequence:
                self._drafter.forget(seq_id)
                del self._drafted[seq_id]

    def check_integrity(self) -> None:
        """Prove that the drafter keeps nothing for sequences that have ended.

        Raises:
            RuntimeError: it does.
        """
        self.forget_ended()
        if orphans := set(self._drafter.seq_ids) - self._drafted.keys():
            raise RuntimeError(f"speculator: kept for nobody: {sorted(orphans)}")

    def _requests(self, batch: ScheduledBatch) -> Iterator[DraftRequest]:
        budget = self._step_budget - batch.num_tokens
        for span in batch.spans:
            sequence = self._scheduler.sequence(span.seq_id)
            if sequence is None or span.sampling is None or not (_is_decoding(span) and span.sampling.speculative):
                continue
            if sequence.followers:  # branches begin in this step, from the blocks as they are
                continue
            drafted = self._drafted.setdefault(
                span.seq_id, _Drafted(sequence, DraftLength(self._config.num_speculative_tokens))
            )
            limit = drafted.length.next() if self._config.adaptive else self._config.num_speculative_tokens
            num_wanted = self._scheduler.max_len - sequence.num_tokens
            if span.sampling.max_tokens is not None:
                num_wanted = min(num_wanted, span.sampling.max_tokens - span.output_position)
            limit = min(limit, num_wanted - 1, budget)
            if limit > 0:
                budget -= limit
                yield DraftRequest(span, sequence.token_ids, limit)


def _is_decoding(span: ScheduledSpan) -> bool:
    """Whether the span is one token of a sequence that has outputs, and the next is sampled after it."""
    return span.sampling is not None and span.output_position > 0 and len(span.token_ids) == 1


def make_speculator(config: EngineConfig, scheduler: Scheduler) -> Speculator | None:
    """Return what `config` asks for; None if nothing.

    Raises:
        ModelError: the draft model cannot be loaded, or cannot draft for this model.
    """
    speculative = config.speculative_config
    if speculative is None:
        return None
    drafter: Drafter = NgramDrafter(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
    if speculative.method is SpeculativeMethod.DRAFT_MODEL:
        drafter = DraftModelDrafter.load(config, speculative)
    return Speculator(speculative, drafter, scheduler, config.max_num_batched_tokens)
