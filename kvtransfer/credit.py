"""Credit: how many payload bytes a sender may have under way to one receiver.

The receiver's CreditLedger hands a window out once and hands bytes back as blocks land; the sender's
CreditGate makes transfers wait, first come first served, until credit is there. Neither grows with the
number of waiting blocks.
"""

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Claim:
    unit_bytes: int
    max_units: int
    future: asyncio.Future[int]


class CreditGate:
    """The sender's side of one connection. Invariant: credit in hand is never below zero.

    A claim takes no crumbs: while more is to come back it waits for half of what it asks for, or a quarter of the
    window if that is less. What a window holds beyond whole messages would else go round and round as messages of a
    block or two, each at the price of a whole one.
    """

    def __init__(self) -> None:
        self._available_bytes = 0
        self._lent_bytes = 0
        self._kept_bytes = 0
        self._waiting: deque[_Claim] = deque()

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for credit."""
        return any(not claim.future.cancelled() for claim in self._waiting)

    def keep(self, num_bytes: int) -> None:
        """From now on hand out only what is more than this."""
        self._kept_bytes = num_bytes
        self._serve()

    def give(self, num_bytes: int) -> None:
        """Add credit from the receiver and serve who waits, in order."""
        self._take_back(num_bytes)
        self._serve()

    def claim(self, unit_bytes: int, max_units: int) -> asyncio.Future[int]:
        """Ask for credit for 1..max_units units of `unit_bytes`; the future's result says for how many it
        is."""
        claim = _Claim(unit_bytes, max_units, asyncio.get_running_loop().create_future())
        self._waiting.append(claim)
        self._serve()
        return claim.future

    def withdraw(self, future: asyncio.Future[int], unit_bytes: int) -> None:
        """Give a claim up; credit that it has got goes to the next."""
        if future.done() and not future.cancelled():
            self._take_back(future.result() * unit_bytes)
        else:
            future.cancel()
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            claim = self._waiting[0]
            if claim.future.cancelled():
                self._waiting.popleft()
                continue
            in_hand_bytes = self._available_bytes - self._kept_bytes
            num_units = min(claim.max_units, in_hand_bytes // claim.unit_bytes)
            num_units_in_window = (in_hand_bytes + self._lent_bytes) // claim.unit_bytes
            if num_units < max(1, min(claim.max_units, num_units_in_window // 2) // 2):
                return
            self._waiting.popleft()
            self._available_bytes -= num_units * claim.unit_bytes
            self._lent_bytes += num_units * claim.unit_bytes
            claim.future.set_result(num_units)

    def _take_back(self, num_bytes: int) -> None:
        self._available_bytes += num_bytes
        self._lent_bytes = max(0, self._lent_bytes - num_bytes)  # the first credit of a receiver was lent to nobody


class CreditLedger:
    """The receiver's side of one connection. Invariant: outstanding + in hand == window."""

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that have arrived and not been handed back."""
        return self._held_bytes

    def charge(self, num_bytes: int) -> bool:
        """Take in bytes that arrived; False, and nothing taken, if the sender had no credit for them."""
        if self._held_bytes + num_bytes > self._window_bytes:
            return False
        self._held_bytes += num_bytes
        return True

    def hand_back(self, num_bytes: int) -> None:
        """Let go of bytes that were charged; the caller tells the sender."""
        assert num_bytes <= self._held_bytes
        self._held_bytes -= num_bytes
