"""The memory of the host tier: slots of one block each, with the checksum of what was put there."""

import numpy as np
import xxhash

from pdserve.engine.tier_moves import HostSlot


class HostMemory:
    """Owns the bytes of all slots; the system commits a page when it is first written. Checksums are xxh3, 128 bits."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self._memory = np.zeros(num_slots * block_bytes, dtype=np.uint8).data
        self._block_bytes = block_bytes
        self._checksums: list[bytes | None] = [None] * num_slots

    def store(self, slot: HostSlot, payload: memoryview) -> None:
        """Copy a block in."""
        self.bytes_of(slot)[:] = payload
        self._checksums[slot] = xxhash.xxh3_128_digest(payload)

    def is_sound(self, slot: HostSlot) -> bool:
        """Whether the slot still holds what was put there."""
        return self._checksums[slot] == xxhash.xxh3_128_digest(self.bytes_of(slot))

    def bytes_of(self, slot: HostSlot) -> memoryview:
        """Return the memory of a slot itself."""
        return self._memory[slot * self._block_bytes : (slot + 1) * self._block_bytes]
