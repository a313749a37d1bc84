"""Whether shared memory is the faster way between processes of this machine: measured once in a process.

One way is what a socket costs: the kernel copies a block in and out. The other is what a ring costs: a copy in, a copy
out. Both with the same pieces and one thread at each end, the best of a few tries, so that other work on the machine
spoils neither.
"""

import socket
import threading
import time
from dataclasses import dataclass
from functools import cache

from pdserve.kvtransfer.shared_ring import RingShape, SharedRing

_PIECE_BYTES = 512 * 1024
_NUM_PIECES = 8
_NUM_TRIES = 3
_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class ProbedRates:
    """Bytes a second of each way."""

    shared: float
    socket: float

    @property
    def prefers_shared(self) -> bool:
        """Whether blocks should take the shared memory."""
        return self.shared > self.socket


@cache
def probed_rates() -> ProbedRates:
    """Measure; takes some 20 ms the first time.

    Raises:
        UnusableRing, OSError: one of the ways does not exist here.
    """
    return ProbedRates(max(_shared_rate() for _ in range(_NUM_TRIES)), max(_socket_rate() for _ in range(_NUM_TRIES)))


def _shared_rate() -> float:
    shape = RingShape(2, _PIECE_BYTES)
    ring, descriptor = SharedRing.create(shape)
    source, target = memoryview(bytearray(_PIECE_BYTES)), memoryview(bytearray(_PIECE_BYTES))
    with open(descriptor, "rb", buffering=0) as memory:  # reading it stands for the other end's copy
        started_at = time.perf_counter()
        for _ in range(_NUM_PIECES):
            slot = ring.put(source)
            memory.seek(slot * _PIECE_BYTES)
            memory.readinto(target)
            ring.free((slot,))
        return _PIECE_BYTES * _NUM_PIECES / (time.perf_counter() - started_at)


def _socket_rate() -> float:
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(_TIMEOUT_S)
        far.settimeout(_TIMEOUT_S)
        reading = threading.Thread(target=_read_all, args=(far,))
        source = bytearray(_PIECE_BYTES)
        started_at = time.perf_counter()
        reading.start()
        try:
            for _ in range(_NUM_PIECES):
                near.sendall(source)
        finally:
            reading.join()
        return _PIECE_BYTES * _NUM_PIECES / (time.perf_counter() - started_at)


def _read_all(far: socket.socket) -> None:
    target = bytearray(_PIECE_BYTES)
    remaining = _PIECE_BYTES * _NUM_PIECES
    try:
        while remaining > 0:
            received = far.recv_into(target)
            if received == 0:
                return
            remaining -= received
    except TimeoutError:
        return  # the writer finds out by itself
