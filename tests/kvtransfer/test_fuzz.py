"""A receiver under any sequence of frames: it neither fails, hangs nor grows, and its sink is always told the end.

With KVTRANSFER_TESTS=full in the environment there are 20,000 sequences (2 minutes)."""

import asyncio
import gc
import os
from itertools import chain
from pathlib import Path

import msgpack
import pytest
import xxhash
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.kvtransfer import BlockReceiver, KVLayout, ReceiverConfig
from pdserve.kvtransfer.frames import (
    Abort,
    Blocks,
    Credit,
    Done,
    Grant,
    Heartbeat,
    Hello,
    Offer,
    Refused,
    decode,
    encode,
)

LAYOUT = KVLayout("m", num_layers=1, block_size=2, num_kv_heads=1, head_dim=2, dtype="float16")
SIZE = LAYOUT.block_size_bytes
BLOCK = bytes(range(SIZE))
CHECKSUM = xxhash.xxh3_64_intdigest(BLOCK)
EMPTY = xxhash.xxh3_64_intdigest(b"")
IS_FULL_RUN = os.environ.get("KVTRANSFER_TESTS") == "full"
NUM_KEPT = 100
MAX_GROWTH_MIB = 4
LAST_WORD = msgpack.packb([99, "bye", {}])  # ends the connection by its version, in words of its own
LAST_ANSWER = "version 99"

ids = st.sampled_from(["t0", "t1", "t2"])
generations = st.integers(1, 2)
counts = st.integers(0, 3)
hello = Hello("raw", "r1", "decode-0", "d1", LAYOUT, "auto", 10_000)


def _blocks(transfer_id, generation, sequence, indexes, checksum, payloads):
    sizes = (SIZE,) * len(indexes)
    header = Blocks(
        transfer_id, generation, sequence, "raw", 0, len(BLOCK), (), tuple(indexes), sizes, (checksum,) * len(indexes)
    )
    return [encode(header), *payloads]


payloads = st.lists(st.sampled_from([BLOCK, BLOCK * 2, b"", BLOCK[:-1], b"x" * SIZE]), max_size=3)
wild_blocks = st.builds(
    _blocks, ids, generations, counts, st.lists(counts, max_size=3), st.sampled_from([CHECKSUM, 1]), payloads
)
good_blocks = st.builds(lambda t, n: _blocks(t, 1, n, [n], CHECKSUM, [BLOCK]), ids, st.integers(0, 1))
messages = st.one_of(
    st.just(hello),
    st.builds(Offer, ids, generations, st.just((b"h" * 16, b"i" * 16)), st.integers(0, 5), st.integers(0, 10_000)),
    st.builds(lambda t: Offer(t, 1, (b"h" * 16, b"i" * 16), 4, 10_000), ids),
    st.builds(Done, ids, generations, counts, st.sampled_from([0, SIZE, 2 * SIZE]), st.just(b""), st.just(EMPTY)),
    st.builds(Abort, ids, generations, st.sampled_from(["gone", "deadline", "wrong_checksum"]), st.text(max_size=9)),
    st.builds(Heartbeat, st.lists(st.tuples(ids, generations), max_size=3).map(tuple)),
    st.builds(Credit, st.integers(0, 2**64 - 1), st.just(())),
    st.builds(Grant, ids, generations, st.just((0,))),
).map(lambda message: [encode(message)])


def _mutate(frames, place, value):
    header = bytearray(frames[0])
    if header:
        header[place % len(header)] = value
    return [bytes(header), *frames[1:]]


mutants = st.builds(_mutate, st.one_of(messages, wild_blocks), st.integers(0, 200), st.integers(0, 255))
garbage = st.lists(st.binary(max_size=40), min_size=1, max_size=4)
PAUSE = None  # for an answer
anything = st.one_of(messages, good_blocks, wild_blocks, mutants, garbage, st.just(PAUSE))


def _transfer(transfer_id, place, instead):
    """A transfer as it should be, but for one of its steps."""
    steps = [
        [encode(Offer(transfer_id, 1, (b"h" * 16, b"i" * 16), 4, 10_000))],
        PAUSE,
        _blocks(transfer_id, 1, 0, [0], CHECKSUM, [BLOCK]),
        _blocks(transfer_id, 1, 1, [1], CHECKSUM, [BLOCK]),
        [encode(Done(transfer_id, 1, 2, 2 * SIZE, b"", EMPTY))],
        PAUSE,
    ]
    return [*steps[:place], *instead, *steps[place + 1 :]]


transfers = st.builds(_transfer, ids, st.integers(0, 6), st.lists(anything, max_size=2))
sequences = st.one_of(
    st.lists(anything, max_size=10), st.lists(transfers, max_size=3).map(lambda many: list(chain(*many)))
)


class JealousSink:
    """Takes everything and keeps a list of what it should never have been asked."""

    def __init__(self):
        self.open = set()
        self.complaints = []

    async def reserve(self, transfer_id, block_hashes, num_tokens):
        if transfer_id in self.open:
            self.complaints.append(f"{transfer_id} reserved twice")
        self.open.add(transfer_id)
        return range(len(block_hashes))

    async def land(self, transfer_id, blocks, start):
        if transfer_id not in self.open or any(bytes(block) != BLOCK for _, block in blocks):
            self.complaints.append(f"{transfer_id} landed {blocks}")

    async def commit(self, transfer_id, metadata):
        self._end(transfer_id)

    async def release(self, transfer_id, code, message):
        self._end(transfer_id)

    def _end(self, transfer_id):
        if transfer_id not in self.open:
            self.complaints.append(f"{transfer_id} ended twice or never reserved")
        self.open.discard(transfer_id)


class Bench:
    """One receiver for many sequences, each of them on a connection of its own."""

    def __init__(self):
        self.runner = asyncio.Runner()
        self.sink = JealousSink()

    def __enter__(self):
        self.runner.__enter__()
        self.context = self.runner.run(_async(zmq.asyncio.Context))
        self.binding = BlockReceiver.bind(
            self.context,
            node_id="decode-0",
            incarnation="d1",
            layout=LAYOUT,
            sink=self.sink,
            config=ReceiverConfig(credit_bytes=4 * SIZE, max_open_transfers=2),
        )
        self.receiver = self.runner.run(self.binding.__aenter__())
        return self

    def __exit__(self, kind, error, traceback):
        self.runner.run(self.binding.__aexit__(None, None, None))
        self.runner.run(_async(self.context.term))
        self.runner.__exit__(kind, error, traceback)

    async def feed(self, sequence):
        with self.context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(self.receiver.endpoint)
            await dealer.send(encode(hello))
            for frames in sequence:
                if frames is not PAUSE:
                    await dealer.send_multipart(frames)
                elif await dealer.poll(5):
                    await dealer.recv_multipart()
            await dealer.send(LAST_WORD)
            async with asyncio.timeout(30):
                while True:
                    message = decode((await dealer.recv_multipart())[0])
                    if isinstance(message, Refused) and LAST_ANSWER in message.message:
                        break
                await self.receiver.idle()

    def check(self):
        assert self.sink.complaints == [] and self.sink.open == set()
        assert self.receiver.counts().open == 0
        assert self.receiver._loops._error is None and self.receiver._tasks._error is None


async def _async(function):
    return function()


def _rss_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _growth_mib(bench, kept):
    """Feed the same again: hypothesis itself grows with every new example."""
    sizes = []
    for _ in range(4):
        for sequence in kept:
            bench.runner.run(bench.feed(sequence))
        gc.collect()
        sizes.append(_rss_mib())
    return sizes[-1] - sizes[0]


def _fuzz(num_sequences):
    with Bench() as bench:

        @given(sequences)
        @settings(max_examples=num_sequences, deadline=60_000, database=None, suppress_health_check=list(HealthCheck))
        def feed(sequence):
            if len(kept) < NUM_KEPT:
                kept.append(sequence)
            bench.runner.run(bench.feed(sequence))
            bench.check()

        kept = []
        feed()
        assert _growth_mib(bench, kept) < MAX_GROWTH_MIB
        counts = bench.receiver.counts()
    assert counts.failures["protocol"] > num_sequences // 20
    assert counts.completed > 0 and counts.blocks_received > 0


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("ERROR", "pdserve.kvtransfer")  # each broken rule is a warning


@pytest.mark.timeout(900)
def test_any_sequence_of_frames_ends_well():
    _fuzz(20_000 if IS_FULL_RUN else 300)
