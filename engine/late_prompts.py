"""Which prompts cannot have their first token in time, and when it is their turn all the same. Pure: no clock."""

import heapq
from collections.abc import Mapping

from pdserve.engine.forks import set_late
from pdserve.engine.scheduled_batch import ScheduledBatch
from pdserve.engine.scheduler_queues import SchedulerQueues
from pdserve.engine.sequence import Sequence, SequenceStatus
from pdserve.engine.sequence_blocks import SequenceBlocks

_AIM = 0.85  # of the target: the rest is for the way of a prompt and of its token, and for what runs before it
_MOST_JUDGED = 32  # in one step: the blocks that the cache has of each are looked up
_PERIOD = 9  # of so many prompt tokens, late prompts have at least one
_MEMORY = 0.8  # weight of what was measured before a step

_Arrival = tuple[int, str]  # and the id


class LatePrompts:
    """Lets prompts that will miss the target stand behind those of their priority that can still keep it.

    Where more arrives than can be answered, first come first served makes everybody late: each prompt waits behind
    some that have missed the target already. A prompt is judged while it waits to be started for the first time: by
    how long it has waited and what its own tokens will take, at the rate of the last steps that were full. Late ones
    keep their order among themselves. Whenever the other prompts of a priority have had `_PERIOD` times the tokens
    that its first late one lacks, that one goes back to its place by arrival, before all that came after it: nobody
    waits for ever, whatever arrives.
    """

    def __init__(
        self,
        target_s: float | None,
        blocks: SequenceBlocks,
        queues: SchedulerQueues,
        sequences: Mapping[str, Sequence],
    ) -> None:
        self._aim_s = None if target_s is None else _AIM * target_s
        self._blocks = blocks
        self._queues = queues
        self._sequences = sequences
        self._full_since: float | None = None  # when a step began that left prompt tokens to the next one
        self._num_in_step = 0
        self._num_measured = 0.0
        self._measured_s = 0.0
        # Heaps keep entries of sequences that are gone until they come first.
        self._judged_at: list[tuple[float, _Arrival]] = []
        self._late: dict[int, list[tuple[_Arrival, int]]] = {}  # and the tokens it lacked, by priority
        self._num_others: dict[int, int] = {}  # prompt tokens computed before the first late one, by priority

    def watch(self, sequence: Sequence) -> None:
        """Judge a sequence from now on that has just been queued; it may lead those that it followed before."""
        if self._aim_s is None or sequence.num_output_tokens:
            return
        if sequence.rank.is_late:
            self._note_late(sequence, self._num_missing(sequence))
        elif sequence.status is SequenceStatus.WAITING and sequence.queue_s is None:
            begin_by = self._begin_by(sequence, self._aim_s, sequence.num_uncomputed_tokens)
            heapq.heappush(self._judged_at, (begin_by, _arrival_of(sequence)))

    def sort(self, now: float) -> None:
        """Let sequences that have become late stand behind the others, and those go back whose turn it is."""
        if self._aim_s is None:
            return
        self._measure(now)
        for _ in range(_MOST_JUDGED):
            if not self._judged_at or self._judged_at[0][0] >= now:
                break
            _, arrival = heapq.heappop(self._judged_at)
            sequence = self._find(arrival)
            if sequence is None or sequence.status is not SequenceStatus.WAITING or sequence.queue_s is not None:
                continue
            num_missing = self._num_missing(sequence)
            begin_by = self._begin_by(sequence, self._aim_s, num_missing)
            if begin_by < now:
                self._move(sequence, is_late=True)
                self._note_late(sequence, num_missing)
            else:  # less is to be computed than it seemed, or in less time
                heapq.heappush(self._judged_at, (begin_by, arrival))
        for priority in list(self._late):
            self._give_turns(priority)

    def note(self, batch: ScheduledBatch, now: float) -> None:
        """Count the prompt tokens of a step that begins now, and those that sequences get before late ones."""
        if self._aim_s is None:
            return
        prompts = [span for span in batch.spans if span.start < span.num_prompt_tokens]
        self._num_in_step = sum(len(span.token_ids) for span in prompts)
        is_full = any(span.start + len(span.token_ids) < span.num_prompt_tokens for span in prompts)
        self._full_since = now if is_full else None
        for span in prompts if self._late else ():
            rank = self._sequences[span.seq_id].rank
            if not rank.is_late and rank.priority in self._late:
                self._num_others[rank.priority] += len(span.token_ids)

    def _measure(self, now: float) -> None:
        """Learn at which rate prompts are computed from a step that had as many of their tokens as it could."""
        if self._full_since is not None:
            self._num_measured = _MEMORY * self._num_measured + self._num_in_step
            self._measured_s = _MEMORY * self._measured_s + now - self._full_since
            self._full_since = None

    def _give_turns(self, priority: int) -> None:
        while (first := self._first_late(priority)) is not None:
            sequence, num_missing = first
            num_due = _PERIOD * min(num_missing, sequence.num_uncomputed_tokens)
            if self._num_others[priority] < num_due:
                return
            self._num_others[priority] -= num_due
            self._move(sequence, is_late=False)
        del self._late[priority], self._num_others[priority]

    def _first_late(self, priority: int) -> tuple[Sequence, int] | None:
        late = self._late[priority]
        while late:
            arrival, num_missing = late[0]
            sequence = self._find(arrival)
            if sequence is not None and sequence.rank.is_late and not sequence.num_output_tokens:
                return sequence, num_missing
            heapq.heappop(late)
        return None

    def _note_late(self, sequence: Sequence, num_missing: int) -> None:
        self._num_others.setdefault(sequence.rank.priority, 0)
        heapq.heappush(self._late.setdefault(sequence.rank.priority, []), (_arrival_of(sequence), num_missing))

    def _move(self, sequence: Sequence, *, is_late: bool) -> None:
        self._queues.leave(sequence)
        set_late(sequence, is_late=is_late)
        self._queues.put(sequence, sequence.status)

    def _find(self, arrival: _Arrival) -> Sequence | None:
        number, seq_id = arrival
        sequence = self._sequences.get(seq_id)
        return sequence if sequence is not None and sequence.rank.arrival == number else None

    def _begin_by(self, sequence: Sequence, aim_s: float, num_missing: int) -> float:
        """Return when a sequence must be started at the latest; while no rate is known, only its wait counts."""
        token_s = self._measured_s / self._num_measured if self._num_measured else 0.0
        return sequence.waiting_since + aim_s - token_s * num_missing

    def _num_missing(self, sequence: Sequence) -> int:
        """Return how many tokens are to be computed, those aside whose blocks are cached."""
        if sequence.block_table or sequence.is_prompt_scored:
            return sequence.num_uncomputed_tokens
        cached = self._blocks.match(sequence.token_ids[:-1], sequence.spec.salt)
        return sequence.num_uncomputed_tokens - len(cached) * self._blocks.block_size


def _arrival_of(sequence: Sequence) -> _Arrival:
    return sequence.rank.arrival, sequence.seq_id
