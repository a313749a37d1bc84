"""One scheduling pass while it is decided. Pure."""

from pdserve.engine.scheduled_batch import BlockCopy
from pdserve.engine.sequence import Sequence


class SchedulingStep:
    """The token budget of one scheduling pass and what it was spent on; `copies` are due before the step writes."""

    __slots__ = ("budget", "chosen", "copies", "has_preempted", "is_first_blocked", "now", "num_served")

    def __init__(self, budget: int, now: float) -> None:
        self.budget = budget
        self.now = now
        self.chosen: dict[Sequence, int] = {}  # tokens of each, in the order of the batch
        self.num_served = 0  # of the chosen ones, those that lack nothing more
        self.copies: list[BlockCopy] = []
        self.has_preempted = False
        self.is_first_blocked = False  # the first waiting sequence could not be started, whatever the budget

    def num_lacking(self, sequence: Sequence) -> int:
        """Return how many tokens `sequence` lacks beside those that are chosen already."""
        return sequence.num_uncomputed_tokens - self.chosen.get(sequence, 0)

    def num_with_rest(self, sequence: Sequence) -> int:
        """Return how many tokens of `sequence` are chosen once it has taken what is left of the budget."""
        return self.chosen.get(sequence, 0) + min(self.num_lacking(sequence), self.budget)

    def take(self, sequence: Sequence) -> None:
        """Spend as much of the budget on `sequence`, which lacks something, as it can use."""
        num_lacking = self.num_lacking(sequence)
        count = min(num_lacking, self.budget)
        self.budget -= count
        self.chosen[sequence] = self.chosen.get(sequence, 0) + count
        self.num_served += count == num_lacking

    def take_one(self, sequence: Sequence) -> None:
        """Spend a token of the budget, which has one, on `sequence`, which lacks no more and has none yet."""
        self.budget -= 1
        self.chosen[sequence] = 1
        self.num_served += 1

    def without(self, num_tokens: int) -> int:
        """Set tokens of the budget aside and return them; the caller gives them back."""
        num_tokens = min(num_tokens, self.budget)
        self.budget -= num_tokens
        return num_tokens
