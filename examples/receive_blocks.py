"""Receive KV blocks into one numpy array, without torch or a model. Prints its address; the other half is
`send_blocks.py`.

    python examples/receive_blocks.py
    python examples/send_blocks.py tcp://127.0.0.1:PORT
"""

import asyncio
from collections.abc import Sequence

import numpy as np
import zmq.asyncio

from pdserve.kvtransfer import BlockReceiver, KVLayout, TransferRefused

LAYOUT = KVLayout("example-model", num_layers=4, block_size=16, num_kv_heads=2, head_dim=64, dtype="float32")
NUM_SLOTS = 256


class ArraySink:
    """Slots in one array. A block that was committed stays in its slot under its hash."""

    def __init__(self) -> None:
        self.cache = np.zeros((NUM_SLOTS, LAYOUT.block_size_bytes), np.uint8)
        self.finished = asyncio.Event()
        self._free = list(range(NUM_SLOTS))
        self._slots: dict[bytes, int] = {}
        self._open: dict[str, dict[int, tuple[bytes, int]]] = {}  # by transfer: index -> hash, slot

    async def reserve(self, transfer_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> Sequence[int]:
        """Take a slot for each block that is not here yet."""
        missing = [index for index, block_hash in enumerate(block_hashes) if block_hash not in self._slots]
        if len(missing) > len(self._free):
            raise TransferRefused("no_blocks", f"{len(missing)} blocks, {len(self._free)} free", retryable=True)
        self._open[transfer_id] = {index: (block_hashes[index], self._free.pop()) for index in missing}
        return missing

    async def land(self, transfer_id: str, blocks: Sequence[tuple[int, memoryview]], start: int) -> None:
        """Copy verified blocks into their slots."""
        for index, payload in blocks:
            _, slot = self._open[transfer_id][index]
            self.cache[slot, start : start + payload.nbytes] = np.frombuffer(payload, np.uint8)

    async def commit(self, transfer_id: str, metadata: bytes) -> None:
        """Keep the blocks."""
        landed = self._open.pop(transfer_id)
        for block_hash, slot in landed.values():
            self._slots[block_hash] = slot
        total = sum(float(self.cache[slot].view(np.float32).sum()) for _, slot in landed.values())
        print(f"{transfer_id}: {len(landed)} blocks landed, sum {total:.1f}, metadata {metadata!r}", flush=True)
        if metadata == b"last":
            self.finished.set()

    async def release(self, transfer_id: str, code: str, message: str) -> None:
        """Give the slots back."""
        self._free.extend(slot for _, slot in self._open.pop(transfer_id).values())
        print(f"{transfer_id}: gave up, {code}: {message}", flush=True)


async def main() -> None:
    """Serve until a transfer says that it is the last."""
    sink = ArraySink()
    with zmq.asyncio.Context() as context:
        async with BlockReceiver.bind(
            context, node_id="receiver", incarnation="1", layout=LAYOUT, sink=sink
        ) as receiver:
            print(receiver.endpoint, flush=True)
            await sink.finished.wait()
            await receiver.idle()


if __name__ == "__main__":
    asyncio.run(main())
