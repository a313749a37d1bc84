"""Ends that split the heads differently: several senders into one receiver, one sender into several receivers."""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest

from pdserve.kvtransfer import (
    BlockReceiver,
    BlockSender,
    KVLayout,
    PeerAddress,
    TransferError,
    TransferRefused,
    hash_blocks,
    place_heads,
)
from pdserve.kvtransfer.block_cutter import as_rows
from pdserve.kvtransfer.rows import convert_rows

LAYOUT = KVLayout("m", num_layers=2, block_size=16, num_kv_heads=4, head_dim=8, dtype="float32")
NUM_TOKENS = 75
VALUES = np.random.default_rng(3).standard_normal((2, 2, 4, NUM_TOKENS, 8)).astype(np.float32)


def _blocks(layout):
    """Lay the values out as one shard stores them."""
    padded = np.zeros((2, 2, 4, layout.num_blocks(NUM_TOKENS) * layout.block_size, 8), np.float32)
    padded[:, :, :, :NUM_TOKENS] = VALUES
    rows = convert_rows(padded[:, :, layout.heads.start : layout.heads.stop].view(np.uint8), "float32", layout.dtype)
    starts = range(0, rows.shape[3], layout.block_size)
    return [np.ascontiguousarray(rows[:, :, :, start : start + layout.block_size]).tobytes() for start in starts]


def _values_in(sink, layout):
    rows = [as_rows(memoryview(bytes(block)), layout) for _, block in sorted(sink.landed["t"].items())]
    return convert_rows(np.concatenate(rows, axis=3), layout.dtype, "float32").view("<f4")[:, :, :, :NUM_TOKENS]


def _hashes(block_size):
    return hash_blocks(range(NUM_TOKENS), block_size, "", "m")


@pytest.fixture
def make_head_sink(make_sink):
    class HeadMemorySink(make_sink):
        def __init__(self, layout):
            super().__init__()
            self.layout = layout

        async def land_heads(self, transfer_id, heads, blocks, start):
            self._enter(transfer_id)
            try:
                self.land_started.set()
                await self.may_land.wait()
                for index, part in blocks:
                    whole = self.landed[transfer_id].setdefault(index, bytearray(self.layout.block_size_bytes))
                    place_heads(memoryview(whole), self.layout, heads, part, start)
            finally:
                self._busy.discard(transfer_id)

    return HeadMemorySink


class Shards:
    """Senders of some heads each, and one receiver whose sink takes them."""

    def __init__(self, context, sink, layout, sources):
        self.sink, self.layout, self.sources = sink, layout, sources
        self._context = context
        self._stack = AsyncExitStack()

    async def __aenter__(self):
        identity = {"node_id": "decode", "incarnation": "1", "layout": self.layout, "sink": self.sink}
        self.receiver = await self._stack.enter_async_context(BlockReceiver.bind(self._context, **identity))
        self.senders = [
            await self._stack.enter_async_context(
                BlockSender(self._context, node_id=f"prefill/{number}", incarnation="1", layout=source)
            )
            for number, source in enumerate(self.sources)
        ]
        return self

    async def __aexit__(self, *error):
        await self._stack.aclose()

    async def offer(self, number, hasher=_hashes, deadline_s=60.0, transfer_id="t"):
        peer = PeerAddress(self.receiver.endpoint, "decode", "1")
        return await self.senders[number].offer(peer, transfer_id, hasher, NUM_TOKENS, deadline_s)

    async def ship(self, number):
        transfer = await self.offer(number)
        await transfer.send_blocks(enumerate(_blocks(self.sources[number])))
        await transfer.finish(f"shard {number}".encode())


@pytest.fixture
def shards(context, make_head_sink):
    def make(*sources, **target):
        layout = replace(LAYOUT, **target)
        return Shards(context, make_head_sink(layout), layout, [replace(LAYOUT, **source) for source in sources])

    return make


@pytest.mark.parametrize(
    ("sources", "target"),
    [
        ([{"head_range": (0, 2)}, {"head_range": (2, 4)}], {}),
        ([{"head_range": (0, 1)}, {"head_range": (1, 3)}, {"head_range": (3, 4)}], {"block_size": 32}),
        ([{"head_range": (2, 4)}, {"head_range": (0, 2), "block_size": 8}], {"head_range": (1, 4)}),
        ([{"head_range": (0, 2)}, {"head_range": (2, 4), "dtype": "int8"}], {"dtype": "int8", "block_size": 24}),
        ([{"head_range": (0, 2), "dtype": "int8"}, {"head_range": (2, 4)}], {"block_size": 64}),
        ([{}], {}),
    ],
    ids=str,
)
async def test_shards_make_one_transfer_within_the_bound_of_one_conversion(shards, sources, target):
    async with shards(*sources, **target) as node:
        await asyncio.gather(*(node.ship(number) for number in range(len(sources))))
        counts = node.receiver.counts()

    heads = node.layout.heads
    expected = VALUES[:, :, heads.start : heads.stop]
    is_rounded = "int8" in str((sources, target))
    bound = np.abs(expected).max(-1, keepdims=True) / 254 * (1 + 1e-5) if is_rounded else np.float32(0)
    assert (np.abs(_values_in(node.sink, node.layout) - expected) <= bound).all()
    assert node.sink.reserved == ["t"] and not node.sink.released
    first = min(range(len(sources)), key=lambda number: node.sources[number].heads.start)
    assert node.sink.committed == {"t": f"shard {first}".encode()}
    assert counts.completed == len(sources)


async def test_equal_shards_are_sent_as_they_lie(shards):
    async with shards({"head_range": (0, 2)}, {"head_range": (2, 4)}) as node:
        await asyncio.gather(node.ship(0), node.ship(1))

        assert [sender.counts().blocks_converted for sender in node.senders] == [0, 0]
        assert node.receiver.counts().blocks_converted == 0
        assert node.receiver.counts().bytes_received == 5 * LAYOUT.block_size_bytes


async def test_one_sender_gives_each_of_several_receivers_its_heads(context, make_sink):
    layouts = [replace(LAYOUT, head_range=heads, block_size=32) for heads in ((0, 1), (1, 4))]
    sinks = [make_sink() for _ in layouts]
    async with AsyncExitStack() as stack:
        receivers = [
            await stack.enter_async_context(
                BlockReceiver.bind(context, node_id=f"decode/{number}", incarnation="1", layout=layout, sink=sink)
            )
            for number, (layout, sink) in enumerate(zip(layouts, sinks, strict=True))
        ]
        sender = await stack.enter_async_context(
            BlockSender(context, node_id="prefill", incarnation="1", layout=LAYOUT)
        )
        for number, receiver in enumerate(receivers):
            peer = PeerAddress(receiver.endpoint, f"decode/{number}", "1")
            transfer = await sender.offer(peer, "t", _hashes, NUM_TOKENS, 60.0)
            await transfer.send_blocks(enumerate(_blocks(LAYOUT)))
            await transfer.finish(b"")

    halves = [_values_in(sink, layout) for sink, layout in zip(sinks, layouts, strict=True)]
    assert np.array_equal(np.concatenate(halves, axis=2), VALUES)


@pytest.mark.parametrize("others_are", ["offered", "sending", "done"])
async def test_what_ends_one_shard_ends_them_all_and_frees_the_slots_once(shards, others_are):
    async with shards({"head_range": (0, 2)}, {"head_range": (2, 4)}) as node:
        lost, other = await node.offer(0), await node.offer(1)
        blocks = list(enumerate(_blocks(node.sources[1])))
        if others_are != "offered":
            await other.send_blocks(blocks[:3] if others_are == "sending" else blocks)
        finishing = asyncio.create_task(other.finish(b"")) if others_are == "done" else None
        await lost.granted()

        await lost.abort("cancelled", "nobody wants it")

        error = await asyncio.wait_for(other.closed(), 30)
        assert error is not None and error.code in ("cancelled", "commit_failed")  # the latter if DONE had arrived
        if finishing is not None:
            with pytest.raises(TransferError, match="nobody wants it"):
                await finishing
        await node.sink.wait_ended("t")
        await asyncio.wait_for(node.receiver.idle(), 30)
    assert node.sink.released == {"t": "cancelled"} and not node.sink.committed


async def test_a_shard_that_never_comes_ends_the_others_by_their_deadline(shards):
    async with shards({"head_range": (0, 2)}, {"head_range": (2, 4)}) as node:
        connecting = await node.offer(0, transfer_id="first")
        await connecting.abort("cancelled", "the connection is there")

        with pytest.raises(TransferError):
            transfer = await node.offer(0, deadline_s=2.0)
            await transfer.send_blocks(enumerate(_blocks(node.sources[0])))
            await transfer.finish(b"")

        await node.sink.wait_ended("t")
        await asyncio.wait_for(node.receiver.idle(), 30)
    assert "t" in node.sink.released and not node.sink.committed


async def test_a_shard_that_comes_too_late_is_told_at_once_and_all_may_try_again(shards):
    async with shards({"head_range": (0, 2)}, {"head_range": (2, 4)}) as node:
        first = await node.offer(0)
        await first.granted()
        await first.abort("cancelled", "nobody wants it")
        await node.sink.wait_ended("t")
        late = await node.offer(1, deadline_s=60.0)
        with pytest.raises(TransferRefused, match="nobody wants it"):
            await asyncio.wait_for(late.granted(), 30)
        node.sink.released.clear()

        await asyncio.gather(node.ship(0), node.ship(1))
    assert node.sink.committed == {"t": b"shard 0"} and not node.sink.released


async def test_shards_that_do_not_fit_together_are_refused(shards):
    async with shards({"head_range": (0, 2)}, {"head_range": (1, 4)}, {"head_range": (2, 4)}) as node:
        first = await node.offer(0)
        await first.granted()

        for number, hasher, text in ((1, _hashes, "heads"), (2, lambda size: [b"x" * 32] * 5, "other blocks")):
            refused = await node.offer(number, hasher)
            with pytest.raises(TransferRefused, match=text) as caught:
                await refused.granted()
            assert caught.value.code == "wrong_shard"

        await first.send_blocks(enumerate(_blocks(node.sources[0])))
        await asyncio.gather(first.finish(b"first"), node.ship(2))
    assert node.sink.committed == {"t": b"first"} and not node.sink.released


async def test_a_refusal_reaches_every_shard(shards, refusal):
    async with shards({"head_range": (0, 2)}, {"head_range": (2, 4)}) as node:
        node.sink.refusal = refusal
        node.sink.may_reserve.clear()
        transfers = [await node.offer(number) for number in range(2)]
        await asyncio.wait_for(node.sink.reserve_started.wait(), 30)
        node.sink.may_reserve.set()

        for transfer in transfers:
            with pytest.raises(TransferRefused, match="the pool is full"):
                await transfer.granted()
        await asyncio.wait_for(node.receiver.idle(), 30)
    assert not node.sink.reserved and not node.sink.released


@pytest.mark.parametrize("seed", range(12))
async def test_any_course_of_three_shards_ends_once(shards, seed):
    """Each shard sends, waits, gives up or finishes as chance has it; the sink checks what it was promised."""
    chance = random.Random(seed)
    heads = [(0, 1), (1, 3), (3, 4)]
    async with shards(*({"head_range": each} for each in heads)) as node:

        async def run(number, gives_up_at):
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
            transfer = await node.offer(number)
            async with transfer:
                await transfer.granted()  # so that nobody is left alone until the deadline
                for step, block in enumerate(enumerate(_blocks(node.sources[number]))):
                    if step == gives_up_at:
                        return
                    await transfer.send_blocks([block])
                await transfer.finish(b"")

        gives_up_at = [chance.choice([None, None, None, 0, 2, 4]) for _ in heads]
        endings = await asyncio.gather(
            *(run(number, when) for number, when in enumerate(gives_up_at)), return_exceptions=True
        )
        await asyncio.wait_for(node.receiver.idle(), 30)

    is_whole = gives_up_at == [None] * 3
    assert all(ending is None or isinstance(ending, TransferError) for ending in endings), endings
    assert ("t" in node.sink.committed) == is_whole
    assert ("t" in node.sink.released) == (not is_whole and bool(node.sink.reserved))
    assert [ending for ending in endings if ending is None] == [None] * (
        3
        if is_whole
        else sum(when is not None and ending is None for when, ending in zip(gives_up_at, endings, strict=True))
    )
