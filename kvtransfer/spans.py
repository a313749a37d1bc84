"""Where the time of one transfer goes: marks taken as it passes its stages, told to a hook as a span when it ends.

Durations only: the clocks of two machines are never compared. Both ends tell a span of their own under one transfer_id.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum

from pdserve.kvtransfer.counters import TransferCounters

DONE = "done"


class Side(StrEnum):
    """Which end tells a span."""

    SENDER = "sender"
    RECEIVER = "receiver"


@dataclass(frozen=True, slots=True)
class TransferSpan:
    """One transfer as one end saw it, from the offer to its end. A stage that it did not reach is None."""

    transfer_id: str
    label: str  # what its owner calls it, a request id for instance
    side: Side
    peer: str
    outcome: str  # DONE, or the code of the failure
    grant_s: float | None  # from the offer to the grant
    first_block_s: float | None  # from the grant to the first block, sent or arrived
    tail_s: float | None  # from `done` to its acknowledgement
    total_s: float
    num_blocks: int  # sent, or landed
    num_bytes: int

    def to_json(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))


SpanHook = Callable[[TransferSpan], None]  # must not raise or block


class TransferMarks:
    """When one transfer passed its stages; fills the histograms of its peer on the way."""

    def __init__(self, counters: TransferCounters, now: float) -> None:
        self._counters = counters
        self._offered_at = now
        self._granted_at: float | None = None
        self._first_block_at: float | None = None
        self._done_at: float | None = None
        self._acknowledged_at: float | None = None

    def granted(self, now: float) -> None:
        """The receiver has granted."""
        self._granted_at = now
        self._counters.offer_to_grant.observe(now - self._offered_at)

    def block_moved(self, now: float) -> None:
        """A block was sent, or has arrived; only the first one matters."""
        if self._first_block_at is None and self._granted_at is not None:
            self._first_block_at = now
            self._counters.first_block.observe(now - self._granted_at)

    def done(self, now: float) -> None:
        """Everything was sent."""
        self._done_at = now

    def acknowledged(self, now: float) -> None:
        """The receiver has taken the blocks over."""
        if self._acknowledged_at is None and self._done_at is not None:
            self._acknowledged_at = now
            self._counters.tail.observe(now - self._done_at)

    def durations(self, now: float) -> tuple[float | None, float | None, float | None, float]:
        """Return grant_s, first_block_s, tail_s and total_s of a transfer that ends `now`."""
        return (
            _between(self._offered_at, self._granted_at),
            _between(self._granted_at, self._first_block_at),
            _between(self._done_at, self._acknowledged_at),
            now - self._offered_at,
        )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
