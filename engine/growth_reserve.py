"""How many blocks running sequences will still need, so that not more are started than can end. Pure."""

from collections.abc import Iterable

from pdserve.engine.sequence import Sequence

_FIRST_GUESS = 128.0  # output tokens, before a sequence has ended here
_SMOOTHING = 0.1  # weight of the newest sequence in the usual length


class GrowthReserve:
    """Expects of a sequence as much output as is usual here, never more than it may have.

    The usual length is a moving average over the sequences that ended, raised at once when one that is longer had to
    be preempted: then too little was expected. `share` of the expected growth is kept free.
    """

    def __init__(self, share: float, block_size: int, max_len: int) -> None:
        self._share = share
        self._block_size = block_size
        self._max_len = max_len
        self._usual_output = _FIRST_GUESS

    def num_blocks(self, sequence: Sequence) -> int:
        """Return how many blocks to keep free for `sequence` beside those for the tokens it has.

        That is one at least if it can grow at all: it may need that one before anybody else has ended.
        """
        max_tokens = sequence.spec.sampling.max_tokens
        num_output = sequence.num_output_tokens
        most = self._max_len - sequence.num_tokens
        if max_tokens is not None:
            most = min(most, max_tokens - num_output)
        if most <= 0 or sequence.spec.is_export:
            return 0
        expected = int(self._share * max(0.0, min(most, self._usual_output - num_output)))
        num_held = max(len(sequence.block_table), self._num_for(sequence.num_tokens))
        return max(1, self._num_for(sequence.num_tokens + expected) - num_held)

    def num_blocks_of_all(self, sequences: Iterable[Sequence]) -> int:
        """Return how many blocks to keep free for all of `sequences`."""
        return sum(map(self.num_blocks, sequences))

    def num_spare(self, sequence: Sequence, growth: int) -> int:
        """Return how many blocks must be left when `sequence` gets its own beside others that need `growth` more.

        None if nobody else can be in need: whoever is alone may have every block.
        """
        return growth + self.num_blocks(sequence) if growth else 0

    def observe_end(self, num_output_tokens: int) -> None:
        """Learn from a sequence that ended by itself."""
        self._usual_output += _SMOOTHING * (num_output_tokens - self._usual_output)

    def observe_preemption(self, num_output_tokens: int) -> None:
        """Learn from a sequence that had to go because blocks ran out."""
        self._usual_output = max(self._usual_output, float(num_output_tokens))

    def _num_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
