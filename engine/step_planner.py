"""One step decided: which tokens of which sequences are computed, and who has to give way for them. Pure."""

from pdserve.engine.forks import set_late
from pdserve.engine.prefill_budget import PrefillBudget
from pdserve.engine.room import Room
from pdserve.engine.scheduled_batch import ScheduledBatch, ScheduledSpan
from pdserve.engine.scheduler_config import SchedulerConfig
from pdserve.engine.scheduler_queues import SchedulerQueues
from pdserve.engine.scheduling_step import SchedulingStep
from pdserve.engine.sequence import Sequence, SequenceStatus
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.engine.sequence_queue import size_of


class StepPlanner:
    """Decides steps over the queues and blocks of one scheduler.

    Order: sequences that lack a single token come first, running and then landed ones, so that a long prompt never
    holds a decode up. Prompts share what is left of the token budget, running and waiting ones alike: one part goes to
    the first in rank, one to the shortest, so that neither a flood of long prompts nor one of short ones starves
    anybody. When blocks run out the last in rank is preempted.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: SequenceBlocks,
        queues: SchedulerQueues,
        room: Room,
        prefill_budget: PrefillBudget,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._queues = queues
        self._room = room
        self._prefill_budget = prefill_budget
        self.num_preemptions = 0

    def plan(self, now: float) -> ScheduledBatch:
        """Decide one step; an empty batch means that nothing can run now."""
        step = SchedulingStep(self._config.max_num_batched_tokens, now)
        self._room.begin_pass()
        self._continue_streams(step)
        self._admit_landed(step)
        step.budget = min(step.budget, self._prefill_budget.tokens(len(step.chosen)))
        self._compute_prompts(step)
        if not step.chosen and step.has_preempted:  # the last running one had to go: start again with its blocks
            return self.plan(now)
        spans = []
        for sequence, count in step.chosen.items():
            spans.append(ScheduledSpan.of(sequence, count, self._blocks.block_size))
            if sequence.followers and count == sequence.num_uncomputed_tokens:
                spans.extend(ScheduledSpan.of_branch(follower) for follower in sequence.followers)
        return ScheduledBatch(tuple(spans), tuple(step.copies))

    def _continue_streams(self, step: SchedulingStep) -> None:
        """Give the running sequences that lack a single token that one; most have a place for it already."""
        for sequence in [each for each in self._queues.running if each.num_uncomputed_tokens == 1]:
            if sequence.status is not SequenceStatus.RUNNING or step.budget == 0:  # preempted in this very step
                continue
            if self._blocks.has_own_place(sequence):
                step.take_one(sequence)
            else:
                self._schedule_running(sequence, step)

    def _continue(self, sequences: list[Sequence], step: SchedulingStep) -> None:
        for sequence in sequences:
            if sequence.status is SequenceStatus.RUNNING and step.budget > 0:  # else preempted in this very step
                self._schedule_running(sequence, step)

    def _admit_landed(self, step: SchedulingStep) -> None:
        """Let sequences join that have blocks: most lack one token, so no running prompt may hold them up."""
        for returned in [sequence for sequence in self._queues.waiting if sequence.block_table]:
            self._room.charge(returned)
            self._queues.move(returned, SequenceStatus.LANDED)
        while (sequence := self._queues.landed.first) is not None and self._has_place(step):
            self._queues.leave(sequence)
            self._begin(sequence, step)
            if sequence.num_uncomputed_tokens == 1:
                self._schedule_running(sequence, step)

    def _compute_prompts(self, step: SchedulingStep) -> None:
        """Give prompts the budget: a part to the first in rank, a part to the shortest, and the rest to the first."""
        kept = step.without(int(step.budget * self._config.short_prompt_share))
        self._compute_first(step)
        if kept:
            step.budget += kept
            self._compute_shortest(step)
            self._compute_first(step)

    def _compute_first(self, step: SchedulingStep) -> None:
        waiting = self._queues.waiting
        for sequence in self._lacking(step):
            while (first := waiting.first) is not None and first.rank < sequence.rank and self._try_start(first, step):
                pass
            self._continue([sequence], step)
        while (first := waiting.first) is not None and self._try_start(first, step):
            pass

    def _compute_shortest(self, step: SchedulingStep) -> None:
        waiting = self._queues.waiting
        for sequence in sorted(self._lacking(step), key=size_of):
            while (shortest := waiting.shortest) is not None and size_of(shortest) < size_of(sequence):
                if not self._try_start(shortest, step):
                    break
            self._continue([sequence], step)
        while (shortest := waiting.shortest) is not None and self._try_start(shortest, step):
            pass

    def _lacking(self, step: SchedulingStep) -> list[Sequence]:
        """Return the running sequences that could use more of the budget; none of a step that only decodes."""
        running = self._queues.running
        if step.num_served == len(running):  # whoever is chosen runs
            return []
        return [sequence for sequence in running if step.num_lacking(sequence)]

    def _try_start(self, sequence: Sequence, step: SchedulingStep) -> bool:
        """Start a waiting sequence if there is a place and room for it; whoever is first may be overtaken so often."""
        if step.has_preempted or not self._has_place(step):
            return False
        is_first = sequence is self._queues.waiting.first
        if is_first and step.is_first_blocked:
            return False
        if not self._admit(sequence, step):
            step.is_first_blocked |= is_first
            return False
        self._begin(sequence, step)
        step.take(sequence)
        return True

    def _has_place(self, step: SchedulingStep) -> bool:
        return step.budget > 0 and len(self._queues.running) < self._config.max_num_seqs

    def _begin(self, sequence: Sequence, step: SchedulingStep) -> None:
        if sequence.queue_s is None:
            sequence.queue_s = step.now - sequence.waiting_since
        sequence.num_overtaken_tokens = 0
        self._queues.put(sequence, SequenceStatus.RUNNING)

    def _schedule_running(self, sequence: Sequence, step: SchedulingStep) -> None:
        while not self._blocks.extend(sequence, step.num_with_rest(sequence), step.copies):
            victim = self._queues.last_of(step.chosen)
            self._preempt(victim, step)
            if victim is sequence:
                return
        step.take(sequence)

    def _preempt(self, sequence: Sequence, step: SchedulingStep) -> None:
        """Take a sequence's blocks; what is not kept elsewhere is computed again when it is started again."""
        self._room.observe_shortage()
        self._queues.leave(sequence)
        self._blocks.preempt(sequence)
        sequence.waiting_since = step.now
        set_late(sequence, is_late=False)  # it has been served before: nobody who came after it goes first
        self._queues.put(sequence, SequenceStatus.WAITING)
        step.has_preempted = True
        self.num_preemptions += 1

    def _admit(self, sequence: Sequence, step: SchedulingStep) -> bool:
        """Give a waiting sequence blocks for all the tokens it has, or nothing at all."""
        if sequence.is_fetching or sequence.swapped is not None:  # `BlockReturn` gives it blocks, when there is room
            return False
        # A scored prompt is computed in full: cached keys and values have no logits.
        cached = [] if sequence.is_prompt_scored else self._blocks.match(sequence.token_ids[:-1], sequence.spec.salt)
        num_blocks = self._blocks.num_for(sequence.num_tokens)
        table = self._room.reserve(sequence, cached, num_blocks, overtakes=step.is_first_blocked)
        if table is None:
            return False
        self._queues.leave(sequence)
        sequence.block_table = table
        sequence.num_computed_tokens = sequence.num_inserted_tokens = len(cached) * self._blocks.block_size
        self._blocks.note_cached(sequence, sequence.num_computed_tokens)
        return True
