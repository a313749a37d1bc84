"""A receiver that is slower than its sender: the sender waits, nobody's memory grows, and nobody else is slowed.

With KVTRANSFER_TESTS=full in the environment it is 1,000 requests at 1 MB/s (5 minutes)."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from pdserve.kvtransfer import (
    BlockReceiver,
    BlockSender,
    KVLayout,
    PeerAddress,
    ReceiverConfig,
    SenderConfig,
    hash_blocks,
)

LAYOUT = KVLayout("m", num_layers=4, block_size=16, num_kv_heads=2, head_dim=64, dtype="float32")  # 64 KiB blocks
IS_FULL_RUN = os.environ.get("KVTRANSFER_TESTS") == "full"
WINDOW = 8 * LAYOUT.block_size_bytes
MAX_GROWTH_BYTES = 24 * 2**20
BOOKKEEPING_BYTES = 32 * 2**10  # of one open request at both ends, whatever its size
BLOCKS_PER_REQUEST = 4


class MeteredSink:
    """Lands at a given rate and keeps nothing."""

    def __init__(self, bytes_per_s):
        self.num_committed = 0
        self.most_resident = 0
        self._bytes_per_s = bytes_per_s
        self._line = asyncio.Lock()  # one disk, one bus: landings of all transfers share the rate

    async def reserve(self, transfer_id, block_hashes, num_tokens):
        return range(len(block_hashes))

    async def land(self, transfer_id, blocks, start):
        async with self._line:
            await asyncio.sleep(sum(block.nbytes for _, block in blocks) / self._bytes_per_s)
        self.most_resident = max(self.most_resident, _resident_bytes())

    async def commit(self, transfer_id, metadata):
        self.num_committed += 1

    async def release(self, transfer_id, code, message):
        raise AssertionError(f"{transfer_id}: {code}: {message}")


def _resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _ship(sender, peer, number, timeout_s):
    num_tokens = BLOCKS_PER_REQUEST * LAYOUT.block_size
    hashes = hash_blocks([number] * num_tokens, LAYOUT.block_size, "", LAYOUT.model_digest)
    transfer = await sender.offer(peer, f"t{number}", hashes, num_tokens, timeout_s)
    # A fresh buffer for each block, as a copy out of a device would be.
    await transfer.send_blocks((index, bytes(LAYOUT.block_size_bytes)) for index in range(BLOCKS_PER_REQUEST))
    await transfer.finish(b"")


async def _flood_a_slow_receiver(context, num_requests, bytes_per_s):
    slow, fast = MeteredSink(bytes_per_s), MeteredSink(10**12)
    config = ReceiverConfig(credit_bytes=WINDOW)
    async with (
        BlockReceiver.bind(
            context, node_id="slow", incarnation="1", layout=LAYOUT, sink=slow, config=config
        ) as slow_end,
        BlockReceiver.bind(
            context, node_id="fast", incarnation="1", layout=LAYOUT, sink=fast, config=config
        ) as fast_end,
        BlockSender(
            context, node_id="sender", incarnation="1", layout=LAYOUT, config=SenderConfig(max_message_bytes=2**18)
        ) as sender,
    ):
        slow_peer, fast_peer = PeerAddress(slow_end.endpoint, "slow", "1"), PeerAddress(fast_end.endpoint, "fast", "1")
        await _ship(sender, slow_peer, 2**20, 60.0)
        await _ship(sender, fast_peer, 2**20, 60.0)
        before = _resident_bytes()
        async with asyncio.TaskGroup() as group:
            for number in range(num_requests):
                group.create_task(_ship(sender, slow_peer, number, 600.0))
            await asyncio.sleep(0)
            start = time.monotonic()
            for number in range(20):
                await _ship(sender, fast_peer, number, 60.0)
            fast_s = time.monotonic() - start
            num_slow_before_fast = slow.num_committed
    assert slow.num_committed == num_requests + 1
    # The requests are 256 KiB each: a tenth of their bytes more would show.
    assert slow.most_resident - before < MAX_GROWTH_BYTES + num_requests * BOOKKEEPING_BYTES
    assert num_slow_before_fast < num_requests // 2, f"the fast peer took {fast_s:.2f} s, held up by the slow one"


@pytest.mark.timeout(600)
async def test_many_requests_at_a_slow_receiver_hold_its_window_and_no_more(context):
    if IS_FULL_RUN:
        await _flood_a_slow_receiver(context, num_requests=1_000, bytes_per_s=1e6)
    else:
        await _flood_a_slow_receiver(context, num_requests=300, bytes_per_s=40e6)  # 79 MB in 2 s


SMALL = KVLayout("m", num_layers=1, block_size=4, num_kv_heads=1, head_dim=32, dtype="float32")  # 1 KiB blocks
SMALL_WINDOW = 8 * SMALL.block_size_bytes


class WatchfulSink(MeteredSink):
    """Looks at what the receiver holds whenever something has landed."""

    receiver = None
    most_held_bytes = 0

    async def land(self, transfer_id, blocks, start):
        await super().land(transfer_id, blocks, start)
        held_bytes = sum(peer._ledger.held_bytes for peer in self.receiver._peers.values())
        self.most_held_bytes = max(self.most_held_bytes, held_bytes)


async def test_a_thousand_requests_at_one_megabyte_a_second_hold_a_window_on_both_ends(context):
    """The sender may have copied no more blocks out of its cache than the window holds, plus one for each message that
    waits; 1,000 requests of 1 KiB take one second at 1 MB/s."""
    slow = WatchfulSink(1e6)
    num_copied = 0

    def copies():
        nonlocal num_copied
        num_copied += 1
        alive.append(num_copied - slow.num_committed)
        yield 0, bytes(SMALL.block_size_bytes)

    async def ship(number):
        hashes = hash_blocks([number] * 4, 4, "", SMALL.model_digest)
        transfer = await sender.offer(peer, f"t{number}", hashes, 4, 600.0)
        await transfer.send_blocks(copies())
        await transfer.finish(b"")

    alive = []
    config = ReceiverConfig(credit_bytes=SMALL_WINDOW, uses_shared_memory=False)
    async with (
        BlockReceiver.bind(
            context, node_id="slow", incarnation="1", layout=SMALL, sink=slow, config=config
        ) as slow.receiver,
        BlockSender(context, node_id="sender", incarnation="1", layout=SMALL) as sender,
    ):
        peer = PeerAddress(slow.receiver.endpoint, "slow", "1")
        await ship(2**20)
        before = _resident_bytes()
        async with asyncio.TaskGroup() as group:
            for number in range(1_000):
                group.create_task(ship(number))
        await slow.receiver.idle()
        connection = sender._connections[peer]
        assert connection.gate._available_bytes == SMALL_WINDOW and not connection.gate._waiting

    assert slow.num_committed == 1_001
    assert slow.most_held_bytes <= SMALL_WINDOW
    # A block counts as alive until its whole transfer is committed: acknowledgements under way add to the window.
    assert max(alive) <= 3 * SMALL_WINDOW // SMALL.block_size_bytes
    assert slow.most_resident - before < MAX_GROWTH_BYTES
