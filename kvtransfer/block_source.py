"""From the sender's blocks to the messages of one connection: cut to the receiver's layout where it differs, compressed
where that pays."""

import time
from collections.abc import Callable, Iterable, Iterator

from pdserve.kvtransfer.agreement import Agreement
from pdserve.kvtransfer.block_run import BlockRun
from pdserve.kvtransfer.compression import CompressionPolicy
from pdserve.kvtransfer.counters import TransferCounters
from pdserve.kvtransfer.encoding import Encoding, compress

SourceBlocks = Iterable[tuple[int, bytes | memoryview]]


class BlockSource:
    """What an outgoing transfer knows of how its blocks travel."""

    def __init__(self, agreement: Agreement, num_tokens: int, counters: TransferCounters) -> None:
        self._agreement = agreement
        self._num_tokens = num_tokens
        self._counters = counters
        self._cutter: object | None = None

    @property
    def is_cut(self) -> bool:
        """Whether other blocks travel than the sender holds."""
        return self._agreement.is_cut

    def wire_blocks(self, blocks: SourceBlocks, is_needed: Callable[[int], bool]) -> Iterator[BlockRun | int]:
        """Yield each block of the wire that is complete with these, as it is asked for; of one that the receiver has,
        the index alone."""
        from pdserve.kvtransfer.block_cutter import BlockCutter  # numpy: needed only where layouts differ

        source, wire = self._agreement.sender, self._agreement.wire
        if self._cutter is None:
            self._cutter = BlockCutter(source, wire, self._num_tokens)
        assert isinstance(self._cutter, BlockCutter)
        for first_index, buffer in blocks:
            for index in self._cutter.feed(BlockRun.of(first_index, buffer, source.block_size_bytes)):
                if not is_needed(index):
                    yield index
                    continue
                self._counters.blocks_converted += 1
                yield BlockRun.of(index, self._cutter.cut(index), wire.block_size_bytes)


def compress_blocks(blocks: list[memoryview], policy: CompressionPolicy) -> tuple[Encoding, list[memoryview]]:
    """Compress each block of a message, and tell the policy; return them as they were if that does not help."""
    started_at = time.perf_counter()
    smaller = [compress(block) for block in blocks]
    num_raw_bytes, num_bytes = sum(block.nbytes for block in blocks), sum(block.nbytes for block in smaller)
    policy.compressed(num_raw_bytes, num_bytes, time.perf_counter() - started_at)
    is_smaller = all(small.nbytes < block.nbytes for small, block in zip(smaller, blocks, strict=True))
    return (Encoding.ZSTD, smaller) if is_smaller else (Encoding.RAW, blocks)
