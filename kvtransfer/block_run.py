"""Consecutive blocks of an offer that lie together in the sender's memory: what becomes one frame."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class BlockRun:
    """A view of the same piece of successive blocks, flat bytes; the first block is `first_index` of the offer.

    The piece is `block_size_bytes` from the byte `start` of a block on: as a rule the whole block.
    """

    first_index: int
    buffer: memoryview
    block_size_bytes: int
    start: int = 0

    @classmethod
    def of(cls, first_index: int, buffer: bytes | memoryview, block_size_bytes: int) -> Self:
        """View a caller's buffer as blocks, without a copy.

        Raises:
            ValueError: the buffer is not contiguous, or not a whole number of blocks.
        """
        view = memoryview(buffer)
        if not view.c_contiguous or view.nbytes == 0 or view.nbytes % block_size_bytes:
            raise ValueError(
                f"block {first_index} must come in a contiguous buffer of {block_size_bytes} bytes or a multiple, "
                f"got {view.nbytes}"
            )
        return cls(first_index, view.cast("B"), block_size_bytes)

    @property
    def num_blocks(self) -> int:
        """How many blocks there are, at least one."""
        return self.buffer.nbytes // self.block_size_bytes

    @property
    def indexes(self) -> range:
        """Their places in the offer."""
        return range(self.first_index, self.first_index + self.num_blocks)

    def part(self, first_index: int, num_blocks: int) -> "BlockRun":
        """Return some of the blocks, in the same memory."""
        start = (first_index - self.first_index) * self.block_size_bytes
        view = self.buffer[start : start + num_blocks * self.block_size_bytes]
        return BlockRun(first_index, view, self.block_size_bytes, self.start)

    def cut_start(self, num_bytes: int) -> "BlockRun":
        """Return a run of one block without its first bytes, in the same memory."""
        assert self.num_blocks == 1
        view = self.buffer[num_bytes:]
        return BlockRun(self.first_index, view, view.nbytes, self.start + num_bytes)

    def cut_end(self, end: int) -> "BlockRun":
        """Return a run of one block up to its byte `end`, in the same memory."""
        assert self.num_blocks == 1
        view = self.buffer[: end - self.start]
        return BlockRun(self.first_index, view, view.nbytes, self.start)

    def split(self, most: int) -> "tuple[BlockRun, BlockRun | None]":
        """Return the first `most` (at least one) blocks, and the others if there are any."""
        if self.num_blocks <= most:
            return self, None
        return self.part(self.first_index, most), self.part(self.first_index + most, self.num_blocks - most)

    def frames(self, most_bytes: int) -> Iterator[memoryview]:
        """View the blocks in as few frames as there can be of at most so many bytes, or of one block."""
        frame_bytes = max(1, most_bytes // self.block_size_bytes) * self.block_size_bytes
        for start in range(0, self.buffer.nbytes, frame_bytes):
            yield self.buffer[start : start + frame_bytes]

    def blocks(self) -> Iterator[memoryview]:
        """View each block by itself."""
        for start in range(0, self.buffer.nbytes, self.block_size_bytes):
            yield self.buffer[start : start + self.block_size_bytes]


class RunCutter:
    """Hands out runs in pieces; takes the next run from its source only when it is asked for more."""

    def __init__(self, runs: Iterator[BlockRun]) -> None:
        self.is_at_end = False
        self._runs = runs
        self._rest: BlockRun | None = None

    def take(self, most: int) -> list[BlockRun]:
        """Return the next `most` blocks, or as many as are left; all the same piece of a block."""
        taken: list[BlockRun] = []
        while most > 0:
            run = self._rest or next(self._runs, None)
            if run is None:
                self.is_at_end = True
                break
            if taken and (run.start, run.block_size_bytes) != (taken[0].start, taken[0].block_size_bytes):
                self._rest = run
                break
            head, self._rest = run.split(most)
            taken.append(head)
            most -= head.num_blocks
        return taken
