"""Moves the bytes of KV blocks between device, host memory and disk, as it is told; decides nothing."""

import time
from collections.abc import Sequence

from pdserve.engine.disk_store import DiskResult, DiskStore
from pdserve.engine.host_memory import HostMemory
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.tier_moves import (
    DropFromDisk,
    HostSlot,
    LoadFromDisk,
    LoadFromHost,
    Move,
    StoreToDisk,
    StoreToHost,
)


class BlockMover:
    """Owns the host tier's memory and the disk store. Memory is copied at once, the disk's thread does the rest."""

    def __init__(self, kv_cache: KVCache, host: HostMemory, disk: DiskStore | None) -> None:
        self._kv_cache = kv_cache
        self._host = host
        self._disk = disk
        self.copy_bytes_per_s: float | None = None  # device to host with its checksum, a moving average

    def perform(self, moves: Sequence[Move]) -> None:
        """Perform moves in their order."""
        for move in moves:
            match move:
                case StoreToHost():
                    self._store(move)
                case StoreToDisk():
                    self._disk_store.write(move.block, self._host.bytes_of(move.slot))
                case LoadFromDisk():
                    self._disk_store.read(move.key)
                case DropFromDisk():
                    self._disk_store.drop(move.key)

    def load(self, loads: Sequence[LoadFromHost]) -> int:
        """Verify and copy blocks back in order, up to the first that fails its check; return how many were sound."""
        for index, load in enumerate(loads):
            if not self._host.is_sound(load.slot):
                return index
            self._kv_cache.write_block(load.block_id, self._host.bytes_of(load.slot))
        return len(loads)

    def keep(self, slot: HostSlot, payload: memoryview) -> None:
        """Put a block that was read from disk into its slot."""
        self._host.store(slot, payload)

    def disk_results(self, timeout_s: float) -> list[DiskResult]:
        """Return the reads and writes that have ended, after waiting up to `timeout_s` for the first."""
        return [] if self._disk is None else self._disk.results(timeout_s)

    def close(self) -> None:
        """Finish what the disk still has to do, and end its thread."""
        if self._disk is not None:
            self._disk.close()

    @property
    def _disk_store(self) -> DiskStore:
        assert self._disk is not None, "only a tree with room on disk decides moves to it"
        return self._disk

    def _store(self, move: StoreToHost) -> None:
        started = time.perf_counter()
        payload = self._kv_cache.block_bytes(move.block_id)
        self._host.store(move.slot, payload)
        rate = payload.nbytes / max(time.perf_counter() - started, 1e-9)
        self.copy_bytes_per_s = rate if self.copy_bytes_per_s is None else 0.9 * self.copy_bytes_per_s + 0.1 * rate
