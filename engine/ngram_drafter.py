"""Prompt lookup: what followed a sequence's last tokens the last time they stood together is the draft.

Saxena 2023, "Prompt lookup decoding". Knows token ids only.
"""

from collections.abc import Collection, Sequence

from pdserve.engine.drafts import DraftRequest, Drafts


class NgramIndex:
    """Where each n-gram of one growing sequence ended last; answers for the n-gram at its very end."""

    __slots__ = ("_ends", "_max", "_min", "_num_indexed")

    def __init__(self, lookup_min: int, lookup_max: int) -> None:
        self._min = lookup_min
        self._max = lookup_max
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> the position after its last token, latest occurrence
        self._num_indexed = 0  # n-grams that end in [0, num_indexed) are known

    def continuation(self, token_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """Return up to `limit` tokens that followed the longest match; () without one.

        A match that overlaps the end repeats itself, as in a run of equal tokens.
        """
        num_tokens = len(token_ids)
        for end in range(self._num_indexed + 1, num_tokens):  # the last n-gram would only find itself
            for size in range(self._min, min(self._max, end) + 1):
                self._ends[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, num_tokens - 1)
        for size in range(min(self._max, num_tokens - 1), self._min - 1, -1):
            start = self._ends.get(tuple(token_ids[num_tokens - size :]))
            if start is not None:
                period = num_tokens - start
                return tuple(token_ids[start + index % period] for index in range(limit))
        return ()


class NgramDrafter:
    """Keeps an index for each sequence that has been drafted for; it grows with the sequence's tokens."""

    method = "ngram"

    def __init__(self, lookup_min: int, lookup_max: int) -> None:
        self._lookup = (lookup_min, lookup_max)
        self._indexes: dict[str, NgramIndex] = {}

    @property
    def seq_ids(self) -> Collection[str]:
        """The sequences for which something is kept."""
        return self._indexes.keys()

    def propose(self, requests: Sequence[DraftRequest]) -> Drafts:
        """Return what followed each sequence's last tokens before."""
        token_ids = []
        for request in requests:
            index = self._indexes.setdefault(request.span.seq_id, NgramIndex(*self._lookup))
            token_ids.append(index.continuation(request.token_ids, request.limit))
        return Drafts(tuple(token_ids))

    def forget(self, seq_id: str) -> None:
        """Drop what is kept for a sequence that has ended."""
        self._indexes.pop(seq_id, None)

    def interrupt(self) -> None:
        """Nothing here takes long."""
