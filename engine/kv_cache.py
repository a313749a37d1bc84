"""The tensors that hold keys and values, block by block. Knows block ids, not sequences."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.block_pool import BlockId
from pdserve.engine.page_commit import PageCommit
from pdserve.kernels.kv_rows import row_elements

if TYPE_CHECKING:  # needs triton, which is installed beside GPUs only
    from pdserve.engine.block_staging import BlockStaging

_MAX_STAGED_BYTES = 2**26  # of one read: what a connection may have under way


class KVCache:
    """One tensor [num_blocks, num_layers, 2, num_kv_heads, block_size, row_elements] of the KV dtype.

    Block-major on purpose: a block is one contiguous run of bytes with all its layers, so that it is sent from where
    it lies and received with one copy. A row is one head of one token, in int8 with its scale (kernels/kv_rows.py).
    With `staging` the tensor lies where the host does not read: what is asked for is a copy.
    """

    def __init__(self, blocks: Tensor, staging: "BlockStaging | None" = None) -> None:
        self._blocks = blocks
        self._staging = staging
        self._memory = None if staging is not None else blocks.view(torch.uint8).view(-1).numpy().data
        self._pages = None if staging is not None else PageCommit(blocks.data_ptr(), blocks.nbytes)
        self.block_size_bytes = blocks[0].numel() * blocks.element_size()
        self._layers = blocks.unbind(1)  # made once: a view costs as much as a small operation, and a step takes each

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> "KVCache":
        """Reserve the memory; the system commits a page when it is first written."""
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, row_elements(head_dim, dtype))
        # numpy's zeros are the system's own zero pages; torch's would be written, and so committed, at once.
        memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        return cls(torch.from_numpy(memory).view(dtype).view(shape))

    @classmethod
    def allocate_on(
        cls,
        device: torch.device,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> "KVCache":
        """Take the memory on a device, where Triton's kernels move blocks."""
        from pdserve.engine.block_staging import BlockStaging

        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, row_elements(head_dim, dtype))
        memory = torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device)
        blocks = memory.view(dtype).view(shape)
        return cls(blocks, BlockStaging(blocks))

    @property
    def is_staged(self) -> bool:
        """Whether blocks are read as copies: to read parts of one costs as much each time as the whole."""
        return self._staging is not None

    def commit_ahead(self, next_block: BlockId, *, is_quiet: bool = True) -> bool:
        """Take a piece of memory that blocks from `next_block` on will need; False when enough is taken."""
        return self._pages is not None and self._pages.advance(next_block * self.block_size_bytes, is_quiet=is_quiet)

    @property
    def num_committed_bytes(self) -> int:
        """How much `commit_ahead` has taken, from the first block on."""
        return 0 if self._pages is None else self._pages.num_committed

    def layer(self, index: int) -> Tensor:  # [num_blocks, 2, num_kv_heads, block_size, row_elements]
        """Return the view of one layer."""
        return self._layers[index]

    @property
    def layers(self) -> tuple[Tensor, ...]:
        """The views of all layers, in order."""
        return self._layers

    def block_bytes(self, block_id: BlockId, num_blocks: int = 1) -> memoryview:
        """Return the memory itself of a block, or of several with successive ids: they lie next to each other.

        Readable until the blocks are released by their owner. With staging a copy, readable for ever.
        """
        if self._memory is None:
            return self._copied([BlockId(block_id + index) for index in range(num_blocks)])
        size = self.block_size_bytes
        return self._memory[block_id * size : (block_id + num_blocks) * size].toreadonly()

    def runs(self, block_ids: Sequence[BlockId]) -> Iterator[tuple[int, memoryview]]:
        """Yield all blocks in order as (index of the first, memory) of each run that lies together.

        That is as they are next to each other in the cache, or with staging as many as are copied at once.
        """
        if self._memory is not None:
            for start, end in adjacent_runs(block_ids, 0, len(block_ids)):
                yield start, self.block_bytes(block_ids[start], end - start)
            return
        most = max(1, _MAX_STAGED_BYTES // self.block_size_bytes)
        for start in range(0, len(block_ids), most):
            yield start, self._copied(block_ids[start : start + most])

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks (source, target), one pair after another; the callers' sequences hold the targets alone."""
        if self._staging is not None:
            self._staging.copy(pairs)
            return
        for source, target in pairs:
            self._blocks[target].copy_(self._blocks[source])

    def write_block(self, block_id: BlockId, payload: memoryview, start: int = 0) -> None:
        """Copy a whole block in, or some layers of it from the byte `start` on; the caller holds the block for an open
        transfer."""
        self.write_blocks([(block_id, payload)], start)

    def write_blocks(self, blocks: Sequence[tuple[BlockId, memoryview]], start: int = 0) -> None:
        """Copy blocks in as `write_block` does; their ids are distinct."""
        for _, payload in blocks:
            assert start + payload.nbytes <= self.block_size_bytes
        if self._staging is not None:
            for _, same_size in groupby(blocks, lambda block: block[1].nbytes):
                block_ids, payloads = zip(*same_size, strict=True)
                self._staging.write(block_ids, payloads, start)
            return
        assert self._memory is not None
        for block_id, payload in blocks:
            first = block_id * self.block_size_bytes + start
            self._memory[first : first + payload.nbytes] = payload

    def write_heads(self, blocks: Sequence[tuple[BlockId, memoryview]], heads: range, start: int = 0) -> None:
        """Copy some heads of blocks in as `write_blocks` does whole ones: a payload is laid out as a block of these
        heads alone, and `start` counts its bytes."""
        num_layers, _, num_heads, block_size, num_elements = self._blocks.shape[1:]
        head_bytes = block_size * num_elements * self._blocks.element_size()
        first = start // (2 * len(heads) * head_bytes)
        for block_id, payload in blocks:
            whole = memoryview(bytearray(self.block_bytes(block_id))) if self._memory is None else self._block(block_id)
            target = np.frombuffer(whole, np.uint8).reshape(num_layers, 2, num_heads, head_bytes)
            part = np.frombuffer(payload, np.uint8).reshape(-1, 2, len(heads), head_bytes)
            target[first : first + len(part), :, heads.start : heads.stop] = part
            if self._staging is not None:
                self._staging.write([block_id], [whole], 0)

    def _block(self, block_id: BlockId) -> memoryview:
        assert self._memory is not None
        return self._memory[block_id * self.block_size_bytes : (block_id + 1) * self.block_size_bytes]

    def _copied(self, block_ids: Sequence[BlockId]) -> memoryview:
        assert self._staging is not None
        return self._staging.read(block_ids)


def adjacent_runs(block_table: Sequence[BlockId], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut the indexes [start, end) where the blocks do not lie next to each other in memory."""
    while start < end:
        stop = start + 1
        while stop < end and block_table[stop] == block_table[stop - 1] + 1:
            stop += 1
        yield start, stop
        start = stop
