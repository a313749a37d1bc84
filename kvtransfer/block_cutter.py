"""Makes the blocks of the wire out of the sender's: another block size, fewer heads, another dtype. Needs numpy."""

import numpy as np

from pdserve.kvtransfer.block_run import BlockRun
from pdserve.kvtransfer.layout import KVLayout
from pdserve.kvtransfer.rows import Bytes, are_scales_usable, convert_rows


class BlockCutter:
    """The blocks of one transfer. It keeps views of the sender's blocks, no copies, and counts in
    tokens: a block of the wire is complete once every token of it that the offer has is here."""

    def __init__(self, source: KVLayout, wire: KVLayout, num_tokens: int) -> None:
        self._source = source
        self._wire = wire
        self._num_tokens = num_tokens
        self._held: dict[int, memoryview] = {}

    def feed(self, run: BlockRun) -> list[int]:
        """Take blocks of the sender; return the indexes of the wire's blocks that are complete with them, in order.

        Raises:
            ValueError: an index is outside the offer.
        """
        num_blocks = self._source.num_blocks(self._num_tokens)
        if not 0 <= run.indexes.start < run.indexes.stop <= num_blocks:
            raise ValueError(f"block {run.first_index} is outside [0, {num_blocks})")
        for index, block in zip(run.indexes, run.blocks(), strict=True):
            self._held[index] = block
        first_token = run.indexes.start * self._source.block_size
        end_token = min(run.indexes.stop * self._source.block_size, self._num_tokens)
        touched = range(first_token // self._wire.block_size, self._wire.num_blocks(end_token))
        return [index for index in touched if all(each in self._held for each in self._needed(index))]

    def cut(self, index: int) -> memoryview:
        """Return a block of the wire that is complete, as memory of its own; positions beyond the tokens are zero."""
        source, wire = self._source, self._wire
        first_token = index * wire.block_size
        rows = np.zeros((wire.num_layers, 2, len(wire.heads), wire.block_size, source.row_size_bytes), np.uint8)
        first_head = wire.heads.start - source.heads.start
        for each in self._needed(index):
            start = max(first_token, each * source.block_size)
            end = min(first_token + wire.block_size, (each + 1) * source.block_size, self._num_tokens)
            block = as_rows(self._held[each], source)[:, :, first_head : first_head + len(wire.heads)]
            own = slice(start - each * source.block_size, end - each * source.block_size)
            rows[:, :, :, start - first_token : end - first_token] = block[:, :, :, own]
        return np.ascontiguousarray(convert_rows(rows, source.dtype, wire.dtype)).data.cast("B")

    def _needed(self, index: int) -> range:
        first_token = index * self._wire.block_size
        end_token = min(first_token + self._wire.block_size, self._num_tokens)
        return range(first_token // self._source.block_size, self._source.num_blocks(end_token))


def as_rows(block: memoryview, layout: KVLayout) -> Bytes:
    """View a block, or some layers of one, as [num_layers, 2, heads, block_size, bytes of a row]."""
    shape = (-1, 2, len(layout.heads), layout.block_size, layout.row_size_bytes)
    return np.frombuffer(block, np.uint8).reshape(shape)


def has_usable_scales(block: memoryview, layout: KVLayout) -> bool:
    """Whether the scales of a block that arrived can be computed with; true of layouts without scales."""
    return layout.dtype != "int8" or are_scales_usable(as_rows(block, layout))


def expand(block: memoryview, wire: KVLayout, own: KVLayout) -> memoryview:
    """Return a block of the wire in the receiver's dtype."""
    return np.ascontiguousarray(convert_rows(as_rows(block, wire), wire.dtype, own.dtype)).data.cast("B")
