"""From verified bytes of the wire to blocks as the receiver stores them: decompressed, checked, in its dtype."""

import asyncio
from collections.abc import Sequence

from pdserve.kvtransfer.agreement import Agreement
from pdserve.kvtransfer.counters import TransferCounters
from pdserve.kvtransfer.encoding import Encoding, decompress
from pdserve.kvtransfer.errors import FailureCode
from pdserve.kvtransfer.incoming_session import Land

Blocks = Sequence[tuple[int, memoryview]]


class UnusableBlock(ValueError):
    """A block whose bytes arrived as they were sent, and which is none."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class BlockDecoder:
    """Decodes the blocks of one transfer; away from the event loop where there is anything to do."""

    def __init__(self, agreement: Agreement, counters: TransferCounters) -> None:
        self._agreement = agreement
        self._counters = counters

    async def decode(self, land: Land) -> Blocks:
        """Return the blocks to be landed.

        Raises:
            UnusableBlock: one does not decompress to a block, or has a scale that is no number.
        """
        agreement = self._agreement
        is_compressed = land.encoding != Encoding.RAW
        if not is_compressed and not agreement.is_expanded and agreement.wire.dtype != "int8":
            return land.blocks
        blocks = await asyncio.to_thread(self._decode, land)
        self._counters.blocks_compressed += len(blocks) if is_compressed else 0
        self._counters.blocks_converted += len(blocks) if agreement.is_expanded else 0
        return blocks

    def _decode(self, land: Land) -> Blocks:
        return [(index, self._decode_block(index, payload, land.encoding)) for index, payload in land.blocks]

    def _decode_block(self, index: int, payload: memoryview, encoding: str) -> memoryview:
        from pdserve.kvtransfer import block_cutter  # numpy: whoever sends and stores alike does not need it

        wire = self._agreement.wire
        block = payload
        if encoding == Encoding.ZSTD:
            try:
                block = decompress(payload, wire.block_size_bytes)
            except ValueError as error:
                raise UnusableBlock(FailureCode.WRONG_ENCODING, f"block {index}: {error}") from error
        if not block_cutter.has_usable_scales(block, wire):
            raise UnusableBlock(FailureCode.WRONG_SCALE, f"block {index} has a scale that is no number")
        return block_cutter.expand(block, wire, self._agreement.receiver) if self._agreement.is_expanded else block
