"""Sequences in the order in which they are served. Pure."""

from bisect import bisect_left
from collections.abc import Iterator

from pdserve.engine.sequence import Sequence

_Size = tuple[int, bool, int, int]


class SequenceQueue:
    """Sequences sorted by rank, which no two share: the first is served first, the last gives way first.

    Finding a place costs O(log n). A preempted sequence keeps its rank, and with it its place among the others.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its place."""
        self._sequences.insert(self._place_of(sequence), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; it must be here."""
        removed = self._sequences.pop(self._place_of(sequence))
        assert removed is sequence, f"{sequence.seq_id} is not in this queue"

    @property
    def first(self) -> Sequence | None:
        """The sequence that is served first; None when there is none."""
        return self._sequences[0] if self._sequences else None

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    def _place_of(self, sequence: Sequence) -> int:
        return bisect_left(self._sequences, sequence.rank, key=lambda other: other.rank)


class WaitingQueue(SequenceQueue):
    """Sequences that wait to be started, by rank and, within one priority, by what they lacked when they came.

    Late ones are behind the others of their priority in both orders.

    Knows how many tokens are missing in all.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_size: list[tuple[_Size, Sequence]] = []
        self._size_of: dict[Sequence, _Size] = {}
        self.num_uncomputed_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its places."""
        super().add(sequence)
        size = self._size_of[sequence] = size_of(sequence)
        self._by_size.insert(bisect_left(self._by_size, size, key=lambda entry: entry[0]), (size, sequence))
        self.num_uncomputed_tokens += size[2]

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; it must be here."""
        super().remove(sequence)
        size = self._size_of.pop(sequence)
        del self._by_size[bisect_left(self._by_size, size, key=lambda entry: entry[0])]
        self.num_uncomputed_tokens -= size[2]

    @property
    def shortest(self) -> Sequence | None:
        """Of the most urgent priority, and of those not late before others, the one that lacks the fewest tokens."""
        return self._by_size[0][1] if self._by_size else None


def size_of(sequence: Sequence) -> _Size:
    """Return what sorts sequences as rank does, but by the tokens they lack before their arrival."""
    priority, is_late, arrival = sequence.rank
    return (priority, is_late, sequence.num_uncomputed_tokens, arrival)
