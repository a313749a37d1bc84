"""The tiers below the device at work: what the prefix tree decided is moved, what comes back is verified."""

import time
from hashlib import blake2b

from pdserve.engine.block_mover import BlockMover
from pdserve.engine.block_return import BlockReturn
from pdserve.engine.config import EngineConfig
from pdserve.engine.disk_store import DiskStore
from pdserve.engine.errors import ModelError
from pdserve.engine.host_memory import HostMemory
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.sequence import Sequence
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.engine.tier_moves import BlockChange, TierLimits, TierUsage

_DISK_TIMEOUT_S = 10.0
# Reads and writes under way, whose bytes lie in memory. What finds no place among them is dropped, and with it all that
# follows it: a burst of evictions should fit.
_MAX_DISK_JOB_BYTES = 256 * 1024**2
_MIN_DISK_JOBS, _MAX_DISK_JOBS = 16, 1024


def tier_limits(config: EngineConfig, block_bytes: int) -> TierLimits:
    """Return how many blocks fit below the device.

    Raises:
        ModelError: not even one fits into a tier that was asked for.
    """
    for name in ("kv_host_memory_bytes", "kv_disk_bytes" if config.kv_disk_dir else "kv_host_memory_bytes"):
        if (size := getattr(config, name)) < block_bytes and (size or name == "kv_disk_bytes"):
            raise ModelError(f"{name}={size} holds no block: one block of this model is {block_bytes} bytes")
    num_disk_blocks = config.kv_disk_bytes // block_bytes if config.kv_disk_dir is not None else 0
    max_jobs = min(_MAX_DISK_JOBS, max(_MIN_DISK_JOBS, _MAX_DISK_JOB_BYTES // block_bytes))
    return TierLimits(config.kv_host_memory_bytes // block_bytes, num_disk_blocks, max_jobs)


class BlockTiers:
    """Binds the tree's decisions to the mover. Driven by the engine between steps, in its thread."""

    def __init__(self, blocks: SequenceBlocks, mover: BlockMover, block_bytes: int) -> None:
        self._blocks = blocks
        self._tree = blocks.tree
        self._mover = mover
        self.block_bytes = block_bytes
        self._return = BlockReturn(blocks)

    @classmethod
    def open(
        cls, blocks: SequenceBlocks, kv_cache: KVCache, config: EngineConfig, limits: TierLimits, identity: str
    ) -> "BlockTiers":
        """Set the tiers up; what lies on disk from before is remembered.

        Raises:
            ModelError: the directory of the disk tier cannot be used.
        """
        block_bytes = kv_cache.block_size_bytes
        host = HostMemory(limits.num_host_slots, block_bytes)
        disk = None
        if config.kv_disk_dir is not None and limits.num_disk_blocks:
            key = blake2b(f"{identity}|{block_bytes}".encode(), digest_size=32, person=b"kv-disk-identity")
            disk = DiskStore.open(config.kv_disk_dir, key.digest(), block_bytes)
            for block in blocks.tree.adopt(disk.blocks()):
                disk.drop(block.key)
        return cls(blocks, BlockMover(kv_cache, host, disk), block_bytes)

    @property
    def copy_bytes_per_s(self) -> float | None:
        """The measured rate of copies to the host tier."""
        return self._mover.copy_bytes_per_s

    def flush(self) -> None:
        """Move what was decided; it must happen before anything is written into the cache."""
        self._mover.perform(self._tree.take_moves())

    def bring_back(self, wanted: list[tuple[Sequence, int]]) -> None:
        """Bring back what the tiers have for sequences that are about to be given blocks, in their order."""
        self._collect(timeout_s=0)
        num_promised = 0
        for sequence, num_blocks in wanted:
            if num_promised > self._blocks.pool.num_blocks:
                return  # nobody after these can be admitted in this step
            plan = self._return.plan_restore(sequence, num_blocks + num_promised)
            self.flush()
            if plan is not None:
                self._return.finish_restore(plan, self._mover.load(plan.loads))
            self._return.start_fetch(sequence, num_blocks + num_promised)
            resume = self._return.plan_resume(sequence, num_blocks + num_promised)
            self.flush()
            if resume is not None:
                self._return.finish_resume(resume, self._mover.load(resume.loads))
            else:
                num_promised += num_blocks

    def disk_deadline(self) -> float:
        """Return until when a step that starts now may wait for the disk, on the monotonic clock."""
        return time.monotonic() + _DISK_TIMEOUT_S

    def wait_for_disk(self, deadline: float) -> bool:
        """Wait until a read has ended, if any is under way; return whether one was. At the deadline, give all up."""
        if not self._tree.num_fetching:
            return False
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not self._collect(remaining_s):
            self._tree.give_up_fetches()
            self.flush()
        return True

    def usage(self) -> tuple[TierUsage, ...]:
        """Return the state of each tier."""
        return self._tree.usage(self.block_bytes)

    def take_changes(self) -> list[BlockChange]:
        """Return what came into the tiers and left them since the last call, if the tree was told to log it."""
        return self._tree.take_changes()

    def clear(self) -> int:
        """Forget every cached block in every tier; return how many the device had."""
        num_blocks = self._tree.clear()
        self.flush()
        return num_blocks

    def close(self) -> None:
        """Finish writing to disk and give its directory up."""
        self._mover.close()

    def _collect(self, timeout_s: float) -> bool:
        results = self._mover.disk_results(timeout_s)
        for result in results:
            if not result.is_read:
                self._tree.written(result.key, result.is_done)
                continue
            slot = self._tree.fetched(result.key, result.is_done)
            if slot is not None and result.payload is not None:
                self._mover.keep(slot, result.payload)
        self.flush()
        return bool(results)
