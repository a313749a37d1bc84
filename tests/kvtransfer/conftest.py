import asyncio
import hashlib
import json
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import zmq.asyncio

from pdserve.kvtransfer import (
    BlockReceiver,
    BlockSender,
    KVLayout,
    PeerAddress,
    ReceiverConfig,
    SenderConfig,
    TransferRefused,
    hash_blocks,
)

LAYOUT = KVLayout("model-a", num_layers=2, block_size=4, num_kv_heads=1, head_dim=64, dtype="float32")


class MemorySink:
    """A sink with slots in memory. It checks the contract: calls of a transfer never overlap, and what was
    reserved is committed or released exactly once. Its gates let a test hold a call."""

    def __init__(self):
        self.present = set()  # hashes of blocks that are here already
        self.refusal = None
        self.landed = {}  # transfer_id -> {index: bytes}
        self.num_landings = 0
        self.reserved = []
        self.committed = {}  # transfer_id -> metadata
        self.released = {}  # transfer_id -> code
        self.cancelled_reserves = []
        self.may_reserve = _open_gate()
        self.may_land = _open_gate()
        self.may_commit = _open_gate()
        self.land_started = asyncio.Event()
        self.commit_started = asyncio.Event()
        self.reserve_started = asyncio.Event()
        self.ended = asyncio.Condition()
        self._busy = set()

    async def reserve(self, transfer_id, block_hashes, num_tokens):
        self.reserve_started.set()
        try:
            await self.may_reserve.wait()
        except asyncio.CancelledError:
            self.cancelled_reserves.append(transfer_id)
            raise
        if self.refusal is not None:
            raise self.refusal
        self.reserved.append(transfer_id)
        self.landed[transfer_id] = {}
        return [index for index, block_hash in enumerate(block_hashes) if block_hash not in self.present]

    async def land(self, transfer_id, blocks, start):
        self._enter(transfer_id)
        try:
            self.land_started.set()
            self.num_landings += 1
            await self.may_land.wait()
            for index, payload in blocks:
                before = self.landed[transfer_id].get(index, b"")
                assert len(before) == start, "a piece out of order"
                self.landed[transfer_id][index] = before + bytes(payload)
        finally:
            self._busy.discard(transfer_id)

    async def commit(self, transfer_id, metadata):
        self._enter(transfer_id)
        self._end_once(transfer_id)
        self.committed[transfer_id] = metadata
        self.commit_started.set()
        await self.may_commit.wait()
        self._busy.discard(transfer_id)
        await self._tell()

    async def release(self, transfer_id, code, message):
        self._enter(transfer_id)
        self._end_once(transfer_id)
        self.released[transfer_id] = code
        self._busy.discard(transfer_id)
        await self._tell()

    async def wait_ended(self, transfer_id, timeout_s=30.0):
        async with asyncio.timeout(timeout_s), self.ended:
            await self.ended.wait_for(lambda: transfer_id in self.committed or transfer_id in self.released)

    def _enter(self, transfer_id):
        assert transfer_id not in self._busy, "two calls of one transfer overlap"
        assert transfer_id in self.landed, "a call without a reservation"
        self._busy.add(transfer_id)

    def _end_once(self, transfer_id):
        assert transfer_id not in self.committed and transfer_id not in self.released, "ended twice"

    async def _tell(self):
        async with self.ended:
            self.ended.notify_all()


def _open_gate():
    gate = asyncio.Event()
    gate.set()
    return gate


class Pair:
    """A sender and a receiver over real TCP, and blocks to send."""

    def __init__(self, context, layout):
        self.context = context
        self.layout = layout
        self.sink = MemorySink()
        self._stack = AsyncExitStack()

    async def open(self, receiver_config=None, sender_config=None, sender_layout=None):
        self.receiver = await self._stack.enter_async_context(
            BlockReceiver.bind(
                self.context,
                node_id="decode-0",
                incarnation="d1",
                layout=self.layout,
                sink=self.sink,
                config=receiver_config or ReceiverConfig(),
            )
        )
        self.sender = await self._stack.enter_async_context(
            BlockSender(
                self.context,
                node_id="prefill-0",
                incarnation="p1",
                layout=sender_layout or self.layout,
                config=sender_config or SenderConfig(handshake_timeout_s=30.0),
            )
        )
        self.peer = PeerAddress(self.receiver.endpoint, "decode-0", "d1")
        return self

    async def close(self):
        await self._stack.aclose()

    async def offer(self, transfer_id="t1", num_tokens=10, deadline_s=60.0, peer=None):
        hashes = self.hashes(num_tokens)
        return await self.sender.offer(peer or self.peer, transfer_id, hashes, num_tokens, deadline_s)

    def hashes(self, num_tokens):
        return hash_blocks(range(num_tokens), self.layout.block_size, "", self.layout.model_digest)

    def blocks(self, num_tokens=10):
        num_blocks = -(-num_tokens // self.layout.block_size)
        return [(index, self.block(index)) for index in range(num_blocks)]

    def block(self, index):
        return hashlib.shake_128(f"block {index}".encode()).digest(self.layout.block_size_bytes)


@pytest.fixture
def layout():
    return LAYOUT


@pytest.fixture
async def context():
    with zmq.asyncio.Context() as context:
        yield context


@pytest.fixture
async def make_pair(context, layout):
    pairs = []

    async def make(**options):
        pair = Pair(context, options.pop("layout", layout))
        pairs.append(pair)
        return await pair.open(**options)

    yield make
    for pair in pairs:
        await pair.close()


@pytest.fixture
async def pair(make_pair):
    return await make_pair()


@pytest.fixture
def refusal():
    return TransferRefused("no_blocks", "the pool is full", retryable=True)


@pytest.fixture
def make_sink():
    return MemorySink


PROGRAM = Path(__file__).with_name("peer_process.py")


@asynccontextmanager
async def _process(layout, incarnation="x1", lease_s=10.0, **job):
    job = {"layout": layout.to_wire(), "incarnation": incarnation, "lease_s": lease_s, **job}
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), json.dumps(job), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        line = await asyncio.wait_for(child.stdout.readline(), 50)
        yield child, json.loads(line)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        child._transport.close()


@pytest.fixture
def process():
    """One end of a transfer in a process of its own: an async context manager of the child and its first words."""
    return _process
