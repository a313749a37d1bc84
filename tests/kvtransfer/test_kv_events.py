"""KV events as a subscriber sees them, read by hand as vLLM's own subscribers do."""

import asyncio
import sys

import msgpack
import pytest
import zmq

from pdserve.kvtransfer import CurveKeys, generate_keys
from pdserve.kvtransfer.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventConfig,
    KVEventFormat,
    KVEventPublisher,
    _to_wire,
)

STORED = BlockStored((b"a" * 32, b"b" * 32), b"p" * 32, tuple(range(8)), 4)


@pytest.fixture
async def publisher(context):
    async with KVEventPublisher.bind(context, KVEventConfig(topic="kv@node"), clock=lambda: 1.5) as publisher:
        yield publisher


async def subscribe(socket, publisher):
    """Connect and publish until something comes through: a PUB drops what it sends before it knows of us."""
    socket.linger = 0
    socket.subscribe(b"")
    socket.connect(publisher.endpoint)
    async with asyncio.timeout(30):
        while not await socket.poll(20):
            publisher.publish([])
        last, heard = publisher.publish([]), -1
        while heard < last:
            heard = int.from_bytes((await socket.recv_multipart())[1], "big")
    return last


async def replay(socket, publisher, first):
    socket.linger = 0
    socket.connect(publisher.replay_endpoint)
    await socket.send_multipart([b"", first.to_bytes(8, "big")])
    batches = []
    async with asyncio.timeout(30):
        while True:
            empty, sequence, payload = await socket.recv_multipart()
            assert empty == b""
            if sequence == END_OF_REPLAY:
                return batches
            batches.append((int.from_bytes(sequence, "big"), msgpack.unpackb(payload)))


async def test_events_arrive_in_order_under_consecutive_sequence_numbers(publisher, context):
    with context.socket(zmq.SUB) as subscriber:
        last = await subscribe(subscriber, publisher)

        publisher.publish([STORED, BlockRemoved((b"c" * 32,), "cpu")])
        publisher.publish([AllBlocksCleared()])

        first, second = [await asyncio.wait_for(subscriber.recv_multipart(), 30) for _ in range(2)]
    assert [message[0] for message in (first, second)] == [b"kv@node"] * 2
    assert [int.from_bytes(message[1], "big") for message in (first, second)] == [last + 1, last + 2]
    assert msgpack.unpackb(first[2]) == [
        1.5,
        [
            ["BlockStored", [b"a" * 32, b"b" * 32], b"p" * 32, list(range(8)), 4, None, None, None],
            ["BlockRemoved", [b"c" * 32], "cpu"],
        ],
        None,
    ]
    assert msgpack.unpackb(second[2]) == [1.5, [["AllBlocksCleared"]], None]


def test_the_bytes_are_those_that_are_documented():
    event = BlockStored((b"\1\2",), None, (7,), 1, 3, "GPU", "ada")

    wire = msgpack.packb(_to_wire(event, KVEventFormat.ARRAY))

    assert wire.hex() == "98ab426c6f636b53746f72656491c4020102c091070103a3475055a3616461"


async def test_newer_readers_get_fields_by_name_and_the_topic_in_replays_too(context):
    """As vLLM writes them from 0.26 on; the batch around the events is an array there too."""
    config = KVEventConfig(topic="kv@node", format=KVEventFormat.MAP)
    async with KVEventPublisher.bind(context, config, clock=lambda: 1.5) as publisher:
        publisher.publish([AllBlocksCleared()])
        publisher.publish([STORED, BlockRemoved((b"c" * 32,), "CPU")])
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(publisher.replay_endpoint)
            await dealer.send_multipart([b"", bytes(8)])

            first, second, last = [await asyncio.wait_for(dealer.recv_multipart(), 30) for _ in range(3)]

    assert first[:3] == [b"", b"kv@node", (0).to_bytes(8, "big")]
    assert msgpack.unpackb(first[3]) == [1.5, [{"type": "AllBlocksCleared"}], None]
    stored = {
        "type": "BlockStored",
        "block_hashes": [b"a" * 32, b"b" * 32],
        "parent_block_hash": b"p" * 32,
        "token_ids": list(range(8)),
        "block_size": 4,
        "lora_id": None,
        "medium": None,
        "lora_name": None,
    }
    removed = {"type": "BlockRemoved", "block_hashes": [b"c" * 32], "medium": "CPU"}
    assert msgpack.unpackb(second[3]) == [1.5, [stored, removed], None]
    assert last == [b"", b"", END_OF_REPLAY, b""]


async def test_a_replay_comes_whole_to_who_reads_it_late(context):
    """C172: neither what is kept nor the word that ends it is dropped on the way, however short the live queues are."""
    config = KVEventConfig(max_kept_batches=500, max_queued_batches=1)
    async with KVEventPublisher.bind(context, config) as publisher:
        for _ in range(500):
            publisher.publish([BlockStored((b"h" * 32,), None, tuple(range(60_000, 70_000)), 10_000)])
        with context.socket(zmq.DEALER) as late, context.socket(zmq.DEALER) as next_one:
            late.linger, late.rcvhwm = 0, 1
            late.connect(publisher.replay_endpoint)
            await late.send_multipart([b"", bytes(8)])
            assert await late.poll(30_000)
            assert len(await replay(next_one, publisher, 499)) == 1  # the one before has been answered

            sequences = []
            async with asyncio.timeout(30):
                while END_OF_REPLAY not in sequences:
                    sequences.append((await late.recv_multipart())[1])
    assert [int.from_bytes(each, "big") for each in sequences[:-1]] == list(range(500))


async def test_a_subscriber_that_missed_something_gets_it_again(publisher, context):
    """C172."""
    for number in range(5):
        publisher.publish([BlockRemoved((bytes([number]) * 32,))])
    with context.socket(zmq.DEALER) as dealer:
        batches = await replay(dealer, publisher, 2)

    assert [sequence for sequence, _ in batches] == [2, 3, 4]
    assert batches[0][1][1] == [["BlockRemoved", [b"\2" * 32], None]]


async def test_only_the_last_batches_are_kept(context):
    async with KVEventPublisher.bind(context, KVEventConfig(max_kept_batches=3)) as publisher:
        for _ in range(10):
            publisher.publish([AllBlocksCleared()])
        with context.socket(zmq.REQ) as request:
            request.linger = 0
            request.connect(publisher.replay_endpoint)
            await request.send((0).to_bytes(8, "big"))
            sequence, _ = await asyncio.wait_for(request.recv_multipart(), 30)
        assert int.from_bytes(sequence, "big") == 7


@pytest.mark.parametrize("request_frames", [[b""], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b"more"]])
async def test_a_strange_request_is_passed_over(publisher, context, request_frames):
    publisher.publish([AllBlocksCleared()])
    with context.socket(zmq.DEALER) as stranger, context.socket(zmq.DEALER) as dealer:
        stranger.linger = 0
        stranger.connect(publisher.replay_endpoint)
        await stranger.send_multipart(request_frames)

        assert len(await replay(dealer, publisher, 0)) == 1


async def test_a_subscriber_that_does_not_read_costs_a_bounded_queue(context):
    """C172."""
    config = KVEventConfig(max_queued_batches=10, max_kept_batches=10)
    async with KVEventPublisher.bind(context, config) as publisher:
        with context.socket(zmq.SUB) as subscriber:
            subscriber.rcvhwm = 10
            await subscribe(subscriber, publisher)
            big = BlockStored((b"h" * 32,), None, tuple(range(200_000)), 200_000)

            for _ in range(100):
                publisher.publish([big])

            num_received = 0
            assert await subscriber.poll(30_000)
            while await subscriber.poll(100):
                await subscriber.recv_multipart()
                num_received += 1
    assert 0 < num_received < 90


async def test_a_subscriber_that_is_killed_costs_the_others_nothing(publisher, context):
    """C172."""
    code = "import sys, zmq; s = zmq.Context().socket(zmq.SUB); s.subscribe(b''); s.connect(sys.argv[1]); s.recv(); "
    code += "print('subscribed', flush=True); sys.stdin.read()"  # reads no more, and lives until it is killed
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    victim = await asyncio.create_subprocess_exec(sys.executable, "-c", code, publisher.endpoint, **pipes)
    with context.socket(zmq.SUB) as follower:
        await subscribe(follower, publisher)
        subscribed = asyncio.create_task(victim.stdout.readline())
        async with asyncio.timeout(60):
            while not subscribed.done():
                publisher.publish([STORED])
                await asyncio.sleep(0.01)  # a PUB socket does not say who has subscribed
        victim.kill()
        for _ in range(1_000):
            publisher.publish([STORED])
        await victim.wait()
        publisher.publish([AllBlocksCleared()])

        numbers = []
        async with asyncio.timeout(60):
            while True:
                _, sequence, payload = await follower.recv_multipart()
                numbers.append(int.from_bytes(sequence, "big"))
                if msgpack.unpackb(payload)[1] == [["AllBlocksCleared"]]:
                    break
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) and len(numbers) > 1_000


async def test_nobody_listens_in_without_a_key(context):
    keys = generate_keys()
    async with KVEventPublisher.bind(context, KVEventConfig(curve=keys)) as publisher:
        with context.socket(zmq.SUB) as friend, context.socket(zmq.SUB) as stranger:
            _use_keys(friend, keys, keys)
            _use_keys(stranger, CurveKeys.from_secret(generate_keys().secret_key), keys)
            stranger.linger = 0
            stranger.subscribe(b"")
            stranger.connect(publisher.endpoint)
            await subscribe(friend, publisher)

            publisher.publish([STORED])

            assert (await asyncio.wait_for(friend.recv_multipart(), 30))[0] == b""
            assert not await stranger.poll(100)


def test_token_ids_do_not_leave_the_machine_in_the_clear():
    with pytest.raises(ValueError, match="allow_plaintext"):
        KVEventConfig(endpoint="tcp://0.0.0.0:0")
    KVEventConfig(endpoint="tcp://0.0.0.0:0", replay_endpoint="tcp://0.0.0.0:0", allow_plaintext=True)


def _use_keys(socket, keys, server):
    socket.curve_publickey = keys.public_key.encode()
    socket.curve_secretkey = keys.secret_key.encode()
    socket.curve_serverkey = server.public_key.encode()
