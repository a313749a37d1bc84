"""The only allocator of KV blocks. Knows block ids and who counts on them, not tensors and not tokens."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NewType

from pdserve.engine.errors import NoFreeBlocks

BlockId = NewType("BlockId", int)


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """A snapshot of where the blocks are; free + cached + in_use + in_flight == total."""

    total: int
    free: int
    cached: int
    in_use: int
    in_flight: int


class BlockPool:
    """Owns every block id and the counts that keep it from being reused.

    A block is *in use* while sequences hold it, *in flight* while only open transfers hold it, *cached* while only
    the prefix tree remembers it, *free* otherwise. There is no list of blocks in use: what has a holder is in use.
    Blocks are handed out oldest-freed first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free: deque[BlockId] = deque(BlockId(index) for index in range(num_blocks))
        self._sequence_refs = [0] * num_blocks
        self._transfer_refs = [0] * num_blocks
        self._cached: set[BlockId] = set()
        self._num_in_use = 0
        self._num_in_flight = 0
        self.num_blocks = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free)

    @property
    def next_block(self) -> BlockId | None:
        """The block that `allocate` hands out next; while some were never used, they come first and in order."""
        return self._free[0] if self._free else None

    @property
    def num_table_entries(self) -> int:
        """Blocks that sequences would hold if none were shared: one for each entry of their tables."""
        return sum(self._sequence_refs)

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Take blocks off the free list; the caller's sequence holds each once.

        Raises:
            NoFreeBlocks: fewer are free; nothing was taken.
        """
        if num_blocks > len(self._free):
            raise NoFreeBlocks(num_blocks, len(self._free))
        block_ids = [self._free.popleft() for _ in range(num_blocks)]
        self.share(block_ids)
        return block_ids

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """Add one sequence to the holders of each block."""
        for block_id in block_ids:
            self._count(block_id, -1)
            self._sequence_refs[block_id] += 1
            self._count(block_id, +1)

    def release(self, block_ids: Iterable[BlockId]) -> None:
        """Take one sequence off the holders of each block; the last holder frees it unless the tree remembers it."""
        for block_id in block_ids:
            assert self._sequence_refs[block_id] > 0, f"block {block_id} released more often than held"
            self._count(block_id, -1)
            self._sequence_refs[block_id] -= 1
            self._count(block_id, +1)
            self._free_if_unheld(block_id)

    def move_to_transfer(self, block_ids: Iterable[BlockId]) -> None:
        """Turn one sequence's hold on each block into an open transfer's hold."""
        for block_id in block_ids:
            assert self._sequence_refs[block_id] > 0, f"block {block_id} is not held by a sequence"
            self._count(block_id, -1)
            self._sequence_refs[block_id] -= 1
            self._transfer_refs[block_id] += 1
            self._count(block_id, +1)

    def move_to_sequence(self, block_ids: Iterable[BlockId]) -> None:
        """Turn one transfer's hold on each block into a sequence's hold: the hand-over is complete."""
        for block_id in block_ids:
            assert self._transfer_refs[block_id] > 0, f"block {block_id} is not held by a transfer"
            self._count(block_id, -1)
            self._transfer_refs[block_id] -= 1
            self._sequence_refs[block_id] += 1
            self._count(block_id, +1)

    def release_transfer(self, block_ids: Iterable[BlockId]) -> None:
        """Take one transfer off the holders of each block: it is over, or was aborted."""
        for block_id in block_ids:
            assert self._transfer_refs[block_id] > 0, f"block {block_id} released more often than in flight"
            self._count(block_id, -1)
            self._transfer_refs[block_id] -= 1
            self._count(block_id, +1)
            self._free_if_unheld(block_id)

    def remember(self, block_id: BlockId) -> None:
        """The prefix tree now remembers this block; only the tree calls this, while the block is held."""
        self._cached.add(block_id)

    def forget(self, block_id: BlockId) -> None:
        """The prefix tree has dropped this block; it is free once nobody holds it."""
        self._cached.remove(block_id)
        self._free_if_unheld(block_id)

    def is_held(self, block_id: BlockId) -> bool:
        """Whether a sequence or a transfer counts on the block."""
        return self._sequence_refs[block_id] > 0 or self._transfer_refs[block_id] > 0

    def is_shared(self, block_id: BlockId) -> bool:
        """Whether more than one holder counts on the block: none of them may write into it."""
        return self._sequence_refs[block_id] + self._transfer_refs[block_id] > 1

    def usage(self) -> BlockUsage:
        """Count the blocks by state."""
        cached = self.num_blocks - self.num_free - self._num_in_use - self._num_in_flight
        return BlockUsage(self.num_blocks, self.num_free, cached, self._num_in_use, self._num_in_flight)

    def check_integrity(self) -> None:
        """Prove that each block has exactly one state and that the running counts are right.

        Raises:
            RuntimeError: a block leaked or is owned twice.
        """
        free = set(self._free)
        held = {block_id for block_id in map(BlockId, range(self.num_blocks)) if self.is_held(block_id)}
        in_use = sum(1 for count in self._sequence_refs if count > 0)
        problems = []
        if len(free) != len(self._free):
            problems.append("a block is twice on the free list")
        if free & (held | self._cached):
            problems.append(f"free and owned: {sorted(free & (held | self._cached))}")
        if len(free | held | self._cached) != self.num_blocks:
            problems.append(f"leaked: {self.num_blocks - len(free | held | self._cached)} blocks")
        if (self._num_in_use, self._num_in_flight) != (in_use, len(held) - in_use):
            problems.append("the counts of blocks in use or in flight are wrong")
        if problems:
            raise RuntimeError("block pool: " + "; ".join(problems))

    def _count(self, block_id: BlockId, step: int) -> None:
        if self._sequence_refs[block_id] > 0:
            self._num_in_use += step
        elif self._transfer_refs[block_id] > 0:
            self._num_in_flight += step

    def _free_if_unheld(self, block_id: BlockId) -> None:
        if not self.is_held(block_id) and block_id not in self._cached:
            self._free.append(block_id)
