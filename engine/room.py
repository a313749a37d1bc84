"""Who may have blocks now, of those that hold none. Pure."""

from itertools import islice

from pdserve.engine.block_pool import BlockId
from pdserve.engine.growth_reserve import GrowthReserve
from pdserve.engine.overtaking import Overtaking
from pdserve.engine.scheduler_queues import SchedulerQueues
from pdserve.engine.sequence import Sequence
from pdserve.engine.sequence_blocks import SequenceBlocks


class Room:
    """Gives blocks to a sequence if those who have some can still grow and nobody is overtaken for ever."""

    def __init__(
        self, blocks: SequenceBlocks, queues: SchedulerQueues, growth: GrowthReserve, overtaking: Overtaking
    ) -> None:
        self._blocks = blocks
        self._queues = queues
        self._growth = growth
        self._overtaking = overtaking
        self._num_to_grow: int | None = None  # blocks; counted once a pass, as it costs a look at every sequence

    def begin_pass(self) -> None:
        """Count anew what is needed for growth when it is asked for next."""
        self._num_to_grow = None

    def reserve(
        self, sequence: Sequence, cached: list[BlockId], num_blocks: int, *, overtakes: bool
    ) -> list[BlockId] | None:
        """Return `cached` and as many new blocks as make `num_blocks`, held for `sequence`; None if it has to wait.

        With `overtakes` this is at the cost of the first waiting one, unless it is that one.
        """
        if not self.is_free_for(sequence):
            return None
        table = self._blocks.reserve(cached, num_blocks, self.num_spare(sequence))
        if table is None:
            return None
        self._num_to_grow = self._count_to_grow() + self._growth.num_blocks(sequence)
        if overtakes:
            self.charge(sequence)
        return table

    def is_free_for(self, sequence: Sequence) -> bool:
        """Whether `sequence` may have blocks although others wait."""
        return self._overtaking.is_allowed(sequence, self._queues.waiting.first)

    def charge(self, sequence: Sequence) -> None:
        """Note that `sequence` got blocks, maybe before the first waiting one."""
        self._overtaking.charge(sequence.num_tokens, sequence, self._queues.waiting.first)

    def next_admissions(self, max_seqs: int) -> list[tuple[Sequence, int]]:
        """Return the first waiting sequences that may be admitted, and the blocks each needs with others' growth."""
        candidates = [sequence for sequence in islice(self._queues.waiting, max_seqs) if self.is_free_for(sequence)]
        return [
            (sequence, self._blocks.num_for(sequence.num_tokens) + self.num_spare(sequence))
            for sequence in candidates
            if not sequence.block_table
        ]

    def next_import(self, max_len: int) -> tuple[Sequence, int] | None:
        """Return the first import that waits, if any, and the blocks it needs with others' growth."""
        sequence = self._queues.pending_imports.first
        if sequence is None:
            return None
        num_tokens = min(sequence.num_tokens + 1, max_len)
        return sequence, self._blocks.num_for(num_tokens) + self.num_spare(sequence)

    def num_spare(self, sequence: Sequence) -> int:
        """Return how many blocks must be left when `sequence` gets its own."""
        return self._growth.num_spare(sequence, self._count_to_grow())

    def observe_end(self, sequence: Sequence) -> None:
        """Learn how long sequences become."""
        if sequence.num_output_tokens:
            self._growth.observe_end(sequence.num_output_tokens)

    def observe_shortage(self) -> None:
        """Learn that the sequences with blocks have become longer than was expected."""
        self._growth.observe_preemption(max(sequence.num_output_tokens for sequence in self._queues.growing()))

    def _count_to_grow(self) -> int:
        if self._num_to_grow is None:
            self._num_to_grow = self._growth.num_blocks_of_all(self._queues.growing())
        return self._num_to_grow
