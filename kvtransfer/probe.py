"""How a link between two living ends is: measured with bytes that are nobody's, under the same credit as blocks.

A probe waits its turn for credit like every transfer, and only a few of its frames are under way at a time: a link that
serves is slowed by at most these.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from pdserve.kvtransfer.credit import CreditGate
from pdserve.kvtransfer.errors import TransferError
from pdserve.kvtransfer.frames import Message, Probe

MAX_PROBE_TOTAL_BYTES = 64 * 1024 * 1024
_FRAME_BYTES = 256 * 1024
_MAX_FRAMES_UNDER_WAY = 4
_NUM_ROUND_TRIPS = 5


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """What one end found out about the way to a receiver. All are durations of this end's own clock."""

    connect_s: float | None  # handshake included; None: the connection was there already
    round_trip_s: float  # the shortest of a few
    num_bytes: int
    transfer_s: float  # from the first byte to the last acknowledgement
    is_encrypted: bool
    shares_memory: bool = False  # blocks go through shared memory; this is the speed of the socket beside it

    @property
    def bytes_per_s(self) -> float:
        """How fast the bytes went."""
        return self.num_bytes / self.transfer_s if self.transfer_s > 0 else 0.0


class ProbeLink(Protocol):
    """What a probe needs of its connection."""

    gate: CreditGate
    credit_bytes: int  # that the connection began with

    def send(self, message: Message, payloads: Sequence[memoryview] = ()) -> None:
        """Hand a message to the socket without waiting; a failure ends the connection."""
        ...


class Prober:
    """The probes of one connection that are under way."""

    def __init__(self, link: ProbeLink) -> None:
        self._link = link
        self._next_sequence = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._under_way: dict[int, int] = {}  # bytes of credit, also of probes that nobody waits for any more
        self._error: TransferError | None = None
        self._loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[None] = self._loop.create_future()

    def acknowledged(self, sequence: int) -> None:
        """A probe has come back, and its credit with it; one that was never sent is passed over."""
        self._link.gate.give(self._under_way.pop(sequence, 0))
        waiting = self._waiting.pop(sequence, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def lose(self, error: TransferError) -> None:
        """The connection has ended, and every probe with it."""
        self._error = error
        self._lost.set_result(None)

    async def round_trip_s(self) -> float:
        """Return how long the shortest of a few empty probes took there and back."""
        return min([await self._round_trip_s() for _ in range(_NUM_ROUND_TRIPS)])

    async def transfer_s(self, num_bytes: int) -> float:
        """Send so many bytes; return how long it took until the last was acknowledged."""
        frame_bytes = max(1, min(_FRAME_BYTES, self._link.credit_bytes // 2))
        payload = memoryview(bytes(frame_bytes))
        under_way: set[asyncio.Future[None]] = set()
        start = self._loop.time()
        try:
            left = num_bytes
            while left > 0 or under_way:
                while left > 0 and len(under_way) < _MAX_FRAMES_UNDER_WAY:
                    part = payload[: min(left, frame_bytes)]
                    await self._claim(part.nbytes)
                    under_way.add(self._send(part))
                    left -= part.nbytes
                under_way -= await self._first_of(under_way)
        finally:
            for each in under_way:
                each.cancel()
        return self._loop.time() - start

    async def _round_trip_s(self) -> float:
        start = self._loop.time()
        waiting = self._send(memoryview(b""))
        try:
            await self._first_of({waiting})
        finally:
            waiting.cancel()
        return self._loop.time() - start

    async def _claim(self, num_bytes: int) -> None:
        claim = self._link.gate.claim(num_bytes, 1)
        is_claimed = False
        either: set[asyncio.Future[int] | asyncio.Future[None]] = {claim, self._lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            self._raise_error()
            is_claimed = True
        finally:
            if not is_claimed:
                self._link.gate.withdraw(claim, num_bytes)

    def _send(self, payload: memoryview) -> asyncio.Future[None]:
        self._next_sequence += 1
        sequence = self._next_sequence
        waiting: asyncio.Future[None] = self._loop.create_future()
        self._waiting[sequence] = waiting
        self._under_way[sequence] = payload.nbytes
        waiting.add_done_callback(lambda _: self._waiting.pop(sequence, None))
        probe = Probe(sequence, payload.nbytes, xxhash.xxh3_64_intdigest(payload))
        self._link.send(probe, [payload] if payload.nbytes else [])
        return waiting

    async def _first_of(self, waiting: set[asyncio.Future[None]]) -> set[asyncio.Future[None]]:
        """Wait for an acknowledgement; return those that have come."""
        done, _ = await asyncio.wait({*waiting, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        self._raise_error()
        return done

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
