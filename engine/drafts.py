"""What an engine asks of whoever drafts, and gets: guesses at the tokens that follow."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.engine.scheduled_batch import ScheduledSpan


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Wanted: up to `limit` tokens that may follow `token_ids`, all known tokens of a sequence, the last one included.

    `span` says how they will be sampled; `token_ids` belongs to the sequence and is read only.
    """

    span: ScheduledSpan
    token_ids: Sequence[int]
    limit: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses for each request, in order, perhaps none; and whether the drafter did work that no step repeats."""

    token_ids: tuple[tuple[int, ...], ...]
    is_catching_up: bool = False


class Drafter(Protocol):
    """Makes drafts; what it keeps for a sequence lives until `forget`."""

    @property
    def method(self) -> str:
        """Its name in metrics."""
        ...

    @property
    def seq_ids(self) -> Collection[str]:
        """The sequences for which something is kept."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> Drafts:
        """Draft for each request."""
        ...

    def forget(self, seq_id: str) -> None:
        """Free what is kept for a sequence that has ended."""
        ...

    def interrupt(self) -> None:
        """Give up what is being computed. From any thread."""
        ...
