"""Who may talk: CURVE between nodes, and nothing in the clear beyond loopback."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from pdserve.kvtransfer import (
    BlockReceiver,
    CurveKeys,
    PeerAddress,
    ReceiverConfig,
    SenderConfig,
    TransferError,
    TransferRefused,
    generate_keys,
)
from pdserve.kvtransfer.frames import Hello, Offer, encode
from pdserve.kvtransfer.sockets import is_local


def configs(receiver_keys, sender_keys):
    return {
        "receiver_config": ReceiverConfig(curve=receiver_keys),
        "sender_config": SenderConfig(curve=sender_keys, handshake_timeout_s=30.0),
    }


async def ship(pair, peer=None):
    transfer = await pair.offer(peer=peer)
    await transfer.send_blocks(pair.blocks())
    await transfer.finish(b"")
    assert pair.sink.landed["t1"] == dict(pair.blocks())


async def test_nodes_that_share_a_key_pair_need_to_know_nothing_else(make_pair):
    keys = generate_keys()

    await ship(await make_pair(**configs(keys, keys)))


async def test_nodes_with_keys_of_their_own_name_each_other(make_pair):
    decode, prefill = generate_keys(), generate_keys()
    pair = await make_pair(
        **configs(
            CurveKeys.from_secret(decode.secret_key, [prefill.public_key]),
            CurveKeys.from_secret(prefill.secret_key, [decode.public_key]),
        )
    )

    await ship(pair, PeerAddress(pair.receiver.endpoint, "decode-0", "d1", decode.public_key))


async def test_a_sender_with_a_strangers_key_gets_nowhere(make_pair):
    decode, stranger = generate_keys(), generate_keys()
    pair = await make_pair(**configs(decode, CurveKeys.from_secret(stranger.secret_key, [decode.public_key])))

    with pytest.raises(TransferError) as caught:
        await pair.offer(peer=PeerAddress(pair.receiver.endpoint, "decode-0", "d1", decode.public_key))

    assert (caught.value.code, caught.value.retryable) == ("unauthenticated", False)
    assert pair.receiver.counts().failures == {"unauthenticated": 1}
    assert not pair.sink.reserved


async def test_a_receiver_that_the_sender_does_not_trust_is_not_even_called(make_pair):
    keys = generate_keys()
    pair = await make_pair(**configs(keys, keys))

    with pytest.raises(TransferRefused, match="not a trusted key"):
        await pair.offer(peer=PeerAddress(pair.receiver.endpoint, "decode-0", "d1", generate_keys().public_key))
    assert pair.receiver.counts().failures == {}


@pytest.mark.parametrize("who", ["sender", "receiver"])
async def test_one_end_without_keys_is_no_connection(make_pair, who):
    keys = generate_keys()
    pair = await make_pair(**(configs(keys, None) if who == "sender" else configs(None, keys)))

    with pytest.raises(TransferError):
        await pair.offer()

    assert not pair.sink.reserved and pair.receiver.counts().open == 0


async def test_a_plaintext_flood_at_a_guarded_receiver_is_never_read(make_pair, context):
    keys = generate_keys()
    pair = await make_pair(**configs(keys, keys))
    hello = encode(Hello("evil", "e1", "decode-0", "d1", pair.layout, "auto", 1_000))
    with context.socket(zmq.DEALER) as evil:
        evil.linger = 0
        evil.connect(pair.receiver.endpoint)
        with suppress(zmq.Again):  # once it is refused nothing takes its words
            for _ in range(50):
                await evil.send_multipart([hello, bytes(100_000)], flags=zmq.NOBLOCK)

        await ship(pair)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(evil.recv_multipart(), 0.2)
    assert set(pair.receiver.counts().failures) <= {"unauthenticated"}  # each time that it came again


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
async def test_nothing_is_bound_beyond_loopback_in_the_clear(context, layout, make_sink, endpoint):
    with pytest.raises(ValueError, match="allow_plaintext"):
        async with BlockReceiver.bind(context, endpoint, node_id="d", incarnation="1", layout=layout, sink=make_sink()):
            pass


@pytest.mark.parametrize("config", [ReceiverConfig(allow_plaintext=True), ReceiverConfig(curve=generate_keys())])
async def test_beyond_loopback_with_keys_or_when_told_so(context, layout, make_sink, config):
    async with BlockReceiver.bind(
        context, "tcp://0.0.0.0:0", node_id="d", incarnation="1", layout=layout, sink=make_sink(), config=config
    ) as receiver:
        assert receiver.endpoint.startswith("tcp://0.0.0.0:")


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://127.0.0.1:0", True),
        ("tcp://127.9.9.9:0", True),
        ("tcp://localhost:5", True),
        ("tcp://[::1]:0", True),
        ("ipc:///tmp/x", True),
        ("tcp://10.0.0.1:0", False),
        ("tcp://*:0", False),
        ("tcp://localhost.evil.com:0", False),
        ("udp://127.0.0.1:0", False),
    ],
)
def test_what_is_local(endpoint, expected):
    assert is_local(endpoint) is expected


def test_keys_from_files(tmp_path):
    keys, peer = generate_keys(), generate_keys()
    (tmp_path / "secret").write_text(f"# decode-0\n{keys.secret_key}\n")
    (tmp_path / "trust").write_text(f"# prefill nodes\n{peer.public_key} # prefill-0\n\n")

    loaded = CurveKeys.load(tmp_path / "secret", tmp_path / "trust")

    assert loaded == CurveKeys(keys.public_key, keys.secret_key, frozenset({peer.public_key}))
    assert loaded.trusts(peer.public_key) and not loaded.trusts(keys.public_key)
    assert CurveKeys.load(tmp_path / "secret").trusts(keys.public_key)


@pytest.mark.parametrize("text", ["", "too short", "a" * 40 + "\n" + "b" * 40, "~" * 40])
def test_a_file_without_a_key_is_refused_by_name_and_without_its_text(tmp_path, text):
    (tmp_path / "secret").write_text(text)

    with pytest.raises(ValueError, match="secret") as caught:
        CurveKeys.load(tmp_path / "secret")
    assert not text.strip() or text.strip() not in str(caught.value)


def test_a_secret_is_not_printed():
    keys = generate_keys()

    assert keys.secret_key not in repr(keys)


def test_keys_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="belong"):
        CurveKeys(generate_keys().public_key, generate_keys().secret_key)


@pytest.mark.parametrize("who", ["sender", "receiver", "neither"])
async def test_ends_that_do_not_share_the_key_learn_at_once_what_may_be_wrong(make_pair, who):
    ours = generate_keys()
    keys = {"sender": (ours, None), "receiver": (None, ours), "neither": (ours, generate_keys())}[who]
    pair = await make_pair(**configs(*keys))

    with pytest.raises(TransferError, match="keys"):
        await asyncio.wait_for(pair.offer(), 30)

    if keys[0] is not None:  # the receiver asks for one: it says that somebody came without
        async with asyncio.timeout(30):
            while not pair.receiver.counts().failures:  # noqa: ASYNC110 - its monitor tells of it in its own time
                await asyncio.sleep(0.01)
        assert pair.receiver.counts().failures == {"unauthenticated": 1}


@pytest.mark.parametrize("is_guarded", [True, False])
async def test_strangers_make_a_node_allocate_nothing(make_pair, context, is_guarded):
    keys = generate_keys()
    pair = await make_pair(**(configs(keys, keys) if is_guarded else {}))
    await ship(pair)
    offer = encode(Offer("t", 1, (b"h" * 32,) * 1_000, 1_000 * pair.layout.block_size, 10_000))
    before = _resident_bytes()

    for _ in range(40):
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.sndtimeo = 50
            stranger.connect(pair.receiver.endpoint)
            with suppress(zmq.Again):
                for _ in range(20):
                    await stranger.send_multipart([offer, bytes(64 * 1024)], flags=zmq.NOBLOCK)
            # What came before it has been read; what a stranger still has queued is in this process too.
            await pair.sender.probe(pair.peer, 1, 10.0)

    assert _resident_bytes() - before < 8 * 2**20  # 50 MiB were sent
    assert set(pair.sink.reserved) == {"t1"} and pair.receiver.counts().open == 0
    assert list(pair.receiver._transfers) == []
    assert [peer.node_id for peer in pair.receiver._peers.values()] == ["prefill-0"]
    assert sum(peer._ledger.held_bytes for peer in pair.receiver._peers.values()) == 0


def _resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
