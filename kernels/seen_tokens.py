"""Which tokens a sequence has, as penalties of logits see them. Torch-free."""

from array import array
from collections.abc import Iterable


class SeenTokens:
    """The distinct tokens of a sequence in the order in which they came, and how often each was generated.

    Kept from step to step, so that a step costs what came since and not the length of the sequence.
    """

    __slots__ = ("_places", "counts", "num_generated", "token_ids")

    def __init__(self, prompt_token_ids: Iterable[int] = ()) -> None:
        self.token_ids = array("i", dict.fromkeys(prompt_token_ids))
        self.counts = array("i", bytes(self.token_ids.itemsize * len(self.token_ids)))  # 0: in the prompt alone
        self.num_generated = 0
        self._places = {token_id: place for place, token_id in enumerate(self.token_ids)}

    def add(self, generated_token_ids: Iterable[int]) -> None:
        """Count tokens that follow."""
        for token_id in generated_token_ids:
            place = self._places.setdefault(token_id, len(self.token_ids))
            if place == len(self.token_ids):
                self.token_ids.append(token_id)
                self.counts.append(0)
            self.counts[place] += 1
            self.num_generated += 1

    def followed_by(self, generated_token_ids: Iterable[int]) -> "SeenTokens":
        """Return a copy that has counted these too; this one has not."""
        copied = SeenTokens()
        copied.token_ids, copied.counts = self.token_ids[:], self.counts[:]
        copied.num_generated, copied._places = self.num_generated, self._places.copy()
        copied.add(generated_token_ids)
        return copied
