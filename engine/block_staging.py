"""Blocks between a device and memory that the host reads: gathered and scattered by kernels, on a stream of its own.

On a GPU host memory is pinned, so that copies run beside computation. Without one (Triton's interpreter) the same calls
work on tensors of the CPU, with plain memory and no stream.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from pdserve.engine.block_pool import BlockId
from pdserve.kernels.triton.block_copy import copy_blocks, gather_blocks, scatter_blocks


class BlockStaging:
    """Reads and writes whole blocks of one cache. Host memory is the caller's, and goes when the caller drops it.

    A read waits for what the device was given before; nothing is computed with a written block before it is there.
    """

    def __init__(self, blocks: Tensor) -> None:  # [num_blocks, ..., row_elements], contiguous
        self._blocks = blocks
        self._bytes = blocks.view(blocks.shape[0], -1).view(torch.uint8)  # [num_blocks, bytes of a block]
        self._is_gpu = blocks.device.type == "cuda"
        self._stream = _new_stream(blocks.device) if self._is_gpu else None

    def read(self, block_ids: Sequence[BlockId]) -> memoryview:
        """Return a copy of blocks, one after another. From any thread."""
        host = self._host_memory(len(block_ids), self._bytes.shape[1])
        with self._own_stream():
            host.copy_(self._gathered(block_ids), non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return host.view(-1).numpy().data.toreadonly()

    def write(self, block_ids: Sequence[BlockId], payloads: Sequence[memoryview], start: int = 0) -> None:
        """Copy payloads of one size into blocks, each from the byte `start` of its block on."""
        size = payloads[0].nbytes
        host = self._host_memory(len(block_ids), size)
        rows = host.numpy()
        for index, payload in enumerate(payloads):
            rows[index].data[:] = payload
        with self._own_stream():
            staged = host.to(self._blocks.device, non_blocking=True)
            ids = self._ids(block_ids)
            if size == self._bytes.shape[1]:
                whole = staged.view(self._blocks.dtype).view(len(block_ids), *self._blocks.shape[1:])
                scatter_blocks(whole, self._blocks, ids)
            else:
                self._bytes[ids, start : start + size] = staged
        if self._stream is not None:
            torch.cuda.current_stream(self._blocks.device).wait_stream(self._stream)

    def copy(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy blocks (source, target), as if one pair after another, in as few launches as that allows."""
        with torch.cuda.device(self._blocks.device) if self._is_gpu else nullcontext():
            for part in independent_parts(pairs):
                sources, targets = zip(*part, strict=True)
                copy_blocks(self._blocks, self._ids(sources), self._ids(targets))

    def _gathered(self, block_ids: Sequence[BlockId]) -> Tensor:
        first, last = block_ids[0], block_ids[-1]
        if list(block_ids) == list(range(first, last + 1)):
            return self._bytes[first : last + 1]  # a run is copied from where it lies
        staged = gather_blocks(self._blocks, self._ids(block_ids), self._blocks.dtype)
        return staged.view(len(block_ids), -1).view(torch.uint8)

    def _ids(self, block_ids: Sequence[BlockId]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int64).to(self._blocks.device)

    def _host_memory(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._is_gpu)

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self._blocks.device))
        with torch.cuda.stream(self._stream):
            yield


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # not annotated
    return stream


def independent_parts(pairs: Sequence[tuple[BlockId, BlockId]]) -> Iterator[list[tuple[BlockId, BlockId]]]:
    """Cut pairs (source, target) into parts within which the order does not matter."""
    part: list[tuple[BlockId, BlockId]] = []
    read: set[BlockId] = set()
    written: set[BlockId] = set()
    for source, target in pairs:
        if source in written or target in read or target in written:
            yield part
            part, read, written = [], set(), set()
        part.append((source, target))
        read.add(source)
        written.add(target)
    if part:
        yield part
