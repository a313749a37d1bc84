"""Memory that a sender and a receiver on one machine share: the sender copies blocks in, the receiver reads them there.

The memory has no name. It is a memfd whose descriptor is handed over (`ring_door`), so nothing can stay behind however
both processes end, no other user can open it, and the size of /dev/shm, 64 MiB in a container, is no limit. It is
sealed: neither end can make it shorter under the other's feet. Its pages are reserved when it is made, so that a
machine without room says so at once and not by a signal in the middle of a copy.
"""

import fcntl
import mmap
import os
import sys
from dataclasses import dataclass
from typing import Self

MAX_RING_BYTES = 2**30
MAX_RING_SLOTS = 1_024


class UnusableRing(Exception):
    """There is no shared memory to be had, or what a peer handed over is none."""


@dataclass(frozen=True, slots=True)
class RingShape:
    """Slots of equal size, one after the other."""

    num_slots: int
    slot_size_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.num_slots <= MAX_RING_SLOTS or not 0 < self.size_bytes <= MAX_RING_BYTES:
            raise UnusableRing(f"{self.num_slots} slots of {self.slot_size_bytes} bytes are outside the bounds")

    @classmethod
    def within(cls, size_bytes: int, slot_size_bytes: int) -> Self:
        """Return as many slots as fit.

        Raises:
            UnusableRing: not one does.
        """
        return cls(min(size_bytes // slot_size_bytes, MAX_RING_SLOTS), slot_size_bytes)

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_size_bytes


class SharedRing:
    """The sender's end. A slot belongs to the message that it was filled for until the receiver has returned that
    message's credit; invariant: every slot is free or in use, once.

    The slot freed last is filled first: while the receiver keeps up, the memory in use stays in the processor's cache,
    and a copy into it costs a tenth.
    """

    def __init__(self, shape: RingShape, memory: mmap.mmap) -> None:
        self.shape = shape
        self._view = memoryview(memory)
        self._free = list(reversed(range(shape.num_slots)))
        self._in_use: set[int] = set()

    @classmethod
    def create(cls, shape: RingShape) -> tuple[Self, int]:
        """Reserve the memory; return it and its descriptor, which the caller hands over and closes.

        Raises:
            UnusableRing: the system has none to give.
        """
        if sys.platform != "linux":
            raise UnusableRing("shared memory without a name needs Linux")
        try:
            descriptor = os.memfd_create("kvtransfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise UnusableRing(str(error)) from error
        try:
            os.posix_fallocate(descriptor, 0, shape.size_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(shape, mmap.mmap(descriptor, shape.size_bytes)), descriptor
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise UnusableRing(str(error)) from error

    @property
    def num_free(self) -> int:
        """How many slots can be filled."""
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        """How many slots hold what the receiver may still read."""
        return len(self._in_use)

    def put(self, payload: memoryview) -> int:
        """Copy a block, or a part of one, into a free slot; return which."""
        slot = self._free.pop()
        self._in_use.add(slot)
        first = slot * self.shape.slot_size_bytes
        self._view[first : first + payload.nbytes] = payload
        return slot

    def free(self, slots: tuple[int, ...]) -> bool:
        """Take slots back; False, and nothing taken, if one of them is not in use."""
        if not self._in_use.issuperset(slots) or len(set(slots)) != len(slots):
            return False
        self._in_use.difference_update(slots)
        self._free.extend(slots)
        return True


class RingView:
    """The receiver's end, for reading. The memory stays mapped for as long as a view of it is held anywhere."""

    def __init__(self, shape: RingShape, memory: mmap.mmap) -> None:
        self.shape = shape
        self._view = memoryview(memory).toreadonly()

    @classmethod
    def open(cls, descriptor: int, shape: RingShape) -> Self:
        """Map what a peer handed over; the caller closes the descriptor.

        Raises:
            UnusableRing: it is not a sealed memory of this shape.
        """
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK or os.fstat(descriptor).st_size != shape.size_bytes:
                raise UnusableRing("the memory can be made shorter, or is not as large as it is said to be")
            return cls(shape, mmap.mmap(descriptor, shape.size_bytes, prot=mmap.PROT_READ))
        except (OSError, ValueError) as error:
            raise UnusableRing(str(error)) from error

    def payloads(self, slots: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[memoryview, ...] | None:
        """View the first `sizes` bytes of slots; None if there are no such slots."""
        size_bytes = self.shape.slot_size_bytes
        if any(slot >= self.shape.num_slots for slot in slots) or any(size > size_bytes for size in sizes):
            return None
        firsts = (slot * size_bytes for slot in slots)
        return tuple(self._view[first : first + size] for first, size in zip(firsts, sizes, strict=True))
