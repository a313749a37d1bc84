"""Who may have blocks before the first waiting sequence, although it came later. Pure."""

from pdserve.engine.sequence import Sequence


class Overtaking:
    """Lets sequences pass one that finds no room, not for ever.

    The first waiting sequence is overtaken by as many tokens as it lacks, or by one batch; then all the blocks that
    become free are kept for it. A more urgent one is never overtaken by a less urgent one.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_num_batched_tokens = max_num_batched_tokens

    def is_allowed(self, sequence: Sequence, first: Sequence | None) -> bool:
        """Whether `sequence` may have blocks although `first` waits."""
        if first is None or not _overtakes(sequence, first):
            return True
        limit = max(first.num_uncomputed_tokens, self._max_num_batched_tokens)
        return sequence.rank.priority == first.rank.priority and first.num_overtaken_tokens < limit

    def charge(self, num_tokens: int, sequence: Sequence, first: Sequence | None) -> None:
        """Note that `sequence` got blocks for `num_tokens` while `first` waits."""
        if first is not None and _overtakes(sequence, first):
            first.num_overtaken_tokens += num_tokens


def _overtakes(sequence: Sequence, first: Sequence) -> bool:
    own, other = sequence.rank, first.rank
    # An import is never late: it would pass a late prompt, which has its turn after what is computed here, for ever.
    return own > other or (own.priority == other.priority and own.arrival > other.arrival)
