"""Where each sequence of a scheduler is: one queue for each status but forking, exporting and finished. Pure."""

from collections.abc import Iterator

from pdserve.engine.sequence import Sequence, SequenceStatus
from pdserve.engine.sequence_queue import SequenceQueue, WaitingQueue


class SchedulerQueues:
    """Sequences by what they wait for. A sequence's status says in which queue it is."""

    def __init__(self) -> None:
        self.waiting = WaitingQueue()  # hold nothing
        self.running = SequenceQueue()
        self.pending_imports = SequenceQueue()  # hold nothing
        self.importing = SequenceQueue()  # hold blocks that arrive
        self.landed = SequenceQueue()  # hold blocks that have arrived

    def put(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Give a sequence that is in no queue its status, and a place in the queue of that status."""
        sequence.status = status
        queue = self._queue_of(status)
        if queue is not None:
            queue.add(sequence)

    def move(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Move a sequence from the queue of its status to that of `status`."""
        self.leave(sequence)
        self.put(sequence, status)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue of its status."""
        queue = self._queue_of(sequence.status)
        if queue is not None:
            queue.remove(sequence)

    def growing(self) -> Iterator[Sequence]:
        """Return the sequences that hold blocks and will need more."""
        yield from self.running
        yield from self.landed
        yield from self.importing

    def last_of(self, is_spared: dict[Sequence, int]) -> Sequence:
        """Return the one that gives way first: of the landed and the running ones the last that is not spared."""
        landed = next(reversed(self.landed), None)
        running = next((sequence for sequence in reversed(self.running) if sequence not in is_spared), None)
        if landed is None or running is None:
            chosen = landed or running
            assert chosen is not None, "every sequence with blocks is spared"
            return chosen
        return max(landed, running, key=lambda sequence: sequence.rank)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to be computed for sequences that can be scheduled."""
        num_started = sum(sequence.num_uncomputed_tokens for queue in (self.running, self.landed) for sequence in queue)
        return self.waiting.num_uncomputed_tokens + num_started

    def _queue_of(self, status: SequenceStatus) -> SequenceQueue | None:
        match status:
            case SequenceStatus.WAITING:
                return self.waiting
            case SequenceStatus.RUNNING:
                return self.running
            case SequenceStatus.PENDING:
                return self.pending_imports
            case SequenceStatus.IMPORTING:
                return self.importing
            case SequenceStatus.LANDED:
                return self.landed
            case SequenceStatus.FORKING | SequenceStatus.EXPORTING | SequenceStatus.FINISHED:
                return None
