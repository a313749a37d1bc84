"""A receiver against a peer that does not keep to the rules: a bare DEALER that says what it likes."""

import asyncio
import random
import socket
from contextlib import asynccontextmanager

import msgpack
import pytest
import xxhash
import zmq

from pdserve.kvtransfer import BlockReceiver, ReceiverConfig
from pdserve.kvtransfer.frames import (
    Abort,
    Blocks,
    Credit,
    Done,
    Grant,
    Heartbeat,
    Hello,
    Offer,
    Probe,
    Refuse,
    Refused,
    Welcome,
    decode,
    encode,
)


class RawPeer:
    def __init__(self, pair, dealer):
        self.pair = pair
        self.dealer = dealer

    async def say(self, message, *payloads):
        header = message if isinstance(message, bytes) else encode(message)
        await self.dealer.send_multipart([header, *payloads])

    async def hear(self, kind):
        """Return the next message of this kind; heartbeats and credit in between are passed over."""
        async with asyncio.timeout(30):
            while True:
                header, *payloads = await self.dealer.recv_multipart()
                message = decode(header, len(payloads))
                if isinstance(message, kind):
                    return message
                assert isinstance(message, Heartbeat | Credit), message

    async def greet(self, **changes):
        hello = {
            "node_id": "raw",
            "incarnation": "r1",
            "peer_node_id": "decode-0",
            "peer_incarnation": "d1",
            "layout": self.pair.layout,
            "wire_dtype": "auto",
            "lease_ms": 10_000,
        }
        await self.say(Hello(**{**hello, **changes}))

    async def offer(self, transfer_id="t1", num_tokens=10, generation=1):
        await self.say(Offer(transfer_id, generation, tuple(self.pair.hashes(num_tokens)), num_tokens, 60_000))

    async def granted(self, transfer_id="t1"):
        await self.greet()
        await self.hear(Welcome)
        await self.offer(transfer_id)
        return await self.hear(Grant)

    async def blocks(self, *indexes, sequence=0, generation=1, transfer_id="t1", payloads=None, checksums=None):
        payloads = payloads or [self.pair.block(index) for index in indexes]
        checksums = checksums or [xxhash.xxh3_64_intdigest(self.pair.block(index)) for index in indexes]
        size = self.pair.layout.block_size_bytes
        sizes, sums = (size,) * len(indexes), tuple(checksums)
        header = Blocks(transfer_id, generation, sequence, "raw", 0, size, (), indexes, sizes, sums)
        await self.say(header, *payloads)

    async def done(self, num_blocks=3, num_bytes=None):
        size = self.pair.layout.block_size_bytes
        total = num_blocks * size if num_bytes is None else num_bytes
        await self.say(Done("t1", 1, num_blocks, total, b"", xxhash.xxh3_64_intdigest(b"")))


@pytest.fixture
def connect(context):
    @asynccontextmanager
    async def connect_to(pair):
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(pair.receiver.endpoint)
            yield RawPeer(pair, dealer)

    return connect_to


@pytest.fixture
async def small(make_pair, layout):
    return await make_pair(receiver_config=ReceiverConfig(credit_bytes=3 * layout.block_size_bytes))


def _flip(block):
    return bytes([block[0] ^ 1]) + block[1:]


ATTACKS = {
    "flipped byte": ("wrong_checksum", lambda p: p.blocks(0, payloads=[_flip(p.pair.block(0))])),
    "truncated": ("wrong_size", lambda p: p.blocks(0, payloads=[p.pair.block(0)[:-1]])),
    "empty": ("wrong_size", lambda p: p.blocks(0, payloads=[b""])),
    "other block": ("wrong_checksum", lambda p: p.blocks(0, payloads=[p.pair.block(1)])),
    "not offered": ("not_granted", lambda p: p.blocks(7)),
    "twice in one": ("duplicate_block", lambda p: p.blocks(0, 0)),
    "reordered": ("wrong_sequence", lambda p: p.blocks(0, sequence=1)),
    "done too early": ("incomplete", lambda p: p.done()),
    "over credit": ("over_credit", lambda p: p.blocks(0, 1, 2, 2)),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_wrong_blocks_fail_their_transfer_and_no_other(small, connect, attack):
    code, attempt = ATTACKS[attack]
    async with connect(small) as raw:
        await raw.granted()
        await attempt(raw)

        assert (await raw.hear(Abort)).code == code

        await asyncio.wait_for(small.receiver.idle(), 30)
        assert small.sink.released == {"t1": code}
        assert not any(small.sink.landed["t1"].values())
        assert small.receiver.counts().failures == {code: 1}
        await raw.offer("t2", generation=2)
        assert (await raw.hear(Grant)).transfer_id == "t2"


async def test_a_replayed_message_fails_the_transfer(pair, connect):
    async with connect(pair) as raw:
        await raw.granted()
        await raw.blocks(0)
        await raw.blocks(0)
        assert (await raw.hear(Abort)).code == "wrong_sequence"
    await asyncio.wait_for(pair.receiver.idle(), 30)
    assert pair.sink.released == {"t1": "wrong_sequence"}


async def test_a_duplicated_block_fails_the_transfer(pair, connect):
    async with connect(pair) as raw:
        await raw.granted()
        await raw.blocks(0)
        await raw.blocks(0, sequence=1)
        assert (await raw.hear(Abort)).code == "duplicate_block"


async def test_done_with_false_totals_fails_the_transfer(pair, connect):
    async with connect(pair) as raw:
        await raw.granted()
        await raw.blocks(0, 1, 2)
        await raw.done(num_bytes=1)
        assert (await raw.hear(Abort)).code == "incomplete"
    assert not pair.sink.committed


async def test_frames_of_an_unknown_transfer_are_answered_with_abort(pair, connect):
    async with connect(pair) as raw:
        await raw.granted()
        for say in (raw.blocks(0, transfer_id="t9"), raw.say(Heartbeat((("t9", 1),)))):
            await say
            abort = await raw.hear(Abort)
            assert (abort.transfer_id, abort.code) == ("t9", "unknown_transfer")


async def test_frames_of_another_generation_do_not_touch_the_transfer(pair, connect):
    async with connect(pair) as raw:
        await raw.granted()
        await raw.blocks(0, generation=2)
        abort = await raw.hear(Abort)
        assert (abort.generation, abort.code) == (2, "unknown_transfer")
        assert pair.receiver.counts().open == 1


async def test_credit_comes_back_for_blocks_that_nobody_wants(small, connect):
    async with connect(small) as raw:
        await raw.granted()
        for _ in range(5):
            await raw.blocks(0, 1, 2, transfer_id="t9")
            assert (await raw.hear(Credit)).num_bytes == 3 * small.layout.block_size_bytes
            await raw.hear(Abort)


async def test_credit_comes_back_for_blocks_queued_behind_the_end(small, connect):
    small.sink.may_land.clear()
    async with connect(small) as raw:
        await raw.granted()
        for index, sequence in enumerate((0, 9, 1)):  # the second ends the transfer
            await raw.blocks(index, sequence=sequence)
        await asyncio.wait_for(small.sink.land_started.wait(), 30)
        await raw.offer("t2", generation=2)
        await raw.hear(Grant)
        small.sink.may_land.set()

        async with asyncio.timeout(30):
            num_bytes, codes = 0, []
            while not codes or num_bytes < 3 * small.layout.block_size_bytes:
                match await raw.hear(Credit | Abort):  # credit comes in as few words as the receiver likes
                    case Credit(returned, _):
                        num_bytes += returned
                    case Abort(_, _, code):
                        codes.append(code)
        assert codes == ["wrong_sequence"]
        assert num_bytes == 3 * small.layout.block_size_bytes


async def test_a_short_frame_costs_the_credit_of_a_block(small, connect):
    async with connect(small) as raw:
        await raw.granted()
        await raw.blocks(0, transfer_id="t9", payloads=[b""])
        assert (await raw.hear(Credit)).num_bytes == small.layout.block_size_bytes


async def test_a_flood_of_control_frames_ends_the_transfer(pair, connect):
    pair.sink.may_land.clear()
    async with connect(pair) as raw:
        await raw.granted()
        await raw.blocks(0)
        for _ in range(100):
            await raw.done()
        await raw.say(Heartbeat((("t9", 1),)))
        assert (await raw.hear(Abort)).transfer_id == "t9"
        pair.sink.may_land.set()
        await asyncio.wait_for(pair.receiver.idle(), 30)
        assert pair.sink.released == {"t1": "incomplete"}


async def test_nothing_is_served_before_a_hello(pair, connect):
    async with connect(pair) as raw:
        await raw.offer()
        assert (await raw.hear(Refused)).code == "no_handshake"
    assert not pair.sink.reserved


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x00", b"\xc1" * 50, msgpack.packb([5, "offer", {}]), encode(Grant("t1", 1, ())), encode(Credit(1, ()))],
)
async def test_garbage_ends_the_connection_that_it_came_by(pair, connect, garbage):
    async with connect(pair) as raw:
        await raw.granted()
        await raw.say(garbage)
        assert (await raw.hear(Refused)).code == "protocol"
    await asyncio.wait_for(pair.receiver.idle(), 30)
    assert pair.sink.released == {"t1": "peer_lost"}
    assert pair.receiver.counts().failures["protocol"] == 1


async def test_a_message_of_thousands_of_frames_is_not_looked_into(pair, connect):
    async with connect(pair) as raw:
        await raw.granted()
        await raw.say(encode(Credit(1, ())), *[b"x"] * 5_000)
        assert "5001 frames" in (await raw.hear(Refused)).message
    await asyncio.wait_for(pair.receiver.idle(), 30)


async def test_another_protocol_version_is_refused_by_name(pair, connect):
    async with connect(pair) as raw:
        await raw.say(msgpack.packb([6, "hello", {}]))
        assert (await raw.hear(Refused)).code == "unsupported_version"


async def test_a_second_hello_ends_the_connection(pair, connect):
    async with connect(pair) as raw:
        await raw.granted()
        await raw.greet()
        assert (await raw.hear(Refused)).code == "protocol"


async def test_an_offer_of_an_open_transfer_is_refused(pair, connect):
    async with connect(pair) as raw:
        await raw.granted()
        await raw.offer("t1", generation=2)
        refuse = await raw.hear(Refuse)
        assert (refuse.code, refuse.generation, refuse.retryable) == ("duplicate_transfer", 2, True)


async def test_an_offer_whose_hashes_do_not_fit_its_tokens_is_refused(pair, connect):
    async with connect(pair) as raw:
        await raw.granted()
        await raw.say(Offer("t2", 2, tuple(pair.hashes(4)), 99, 1_000))
        assert (await raw.hear(Refuse)).code == "protocol"


async def test_senders_beyond_the_limit_are_refused_as_overload(make_pair, connect):
    pair = await make_pair(receiver_config=ReceiverConfig(max_peers=1))
    async with connect(pair) as first, connect(pair) as second:
        await first.greet(node_id="first")
        await first.hear(Welcome)
        await second.greet(node_id="second")
        assert (await second.hear(Refused)).code == "overloaded"


async def test_a_frame_larger_than_a_block_is_not_even_received(pair, connect):
    async with connect(pair) as raw:
        await raw.granted()
        await raw.blocks(0, payloads=[bytes(5 * 1024 * 1024)])
        await asyncio.wait_for(pair.receiver.idle(), 30)
    assert pair.sink.released == {"t1": "peer_lost"}


async def test_a_closed_connection_releases_at_once(pair, connect):
    async with connect(pair) as raw:
        await raw.granted()
    await asyncio.wait_for(pair.receiver.idle(), 30)
    assert pair.sink.released == {"t1": "peer_lost"}


async def test_a_living_process_may_not_be_silent_for_ever(make_pair, connect):
    pair = await make_pair(receiver_config=ReceiverConfig(lease_s=0.4, max_silence_s=4.0))
    loop = asyncio.get_running_loop()
    async with connect(pair) as raw:
        begun = loop.time()
        await raw.granted()
        await asyncio.wait_for(pair.receiver.idle(), 30)
        assert loop.time() - begun >= 4.0  # ten leases: the process answers, so its silence alone ended it
    assert pair.sink.released == {"t1": "lease_expired"}


async def test_a_transfer_that_the_sender_does_not_list_any_more_is_released(pair, connect):
    async with connect(pair) as raw:
        await raw.granted()
        await raw.offer("t2", generation=2)
        await raw.hear(Grant)

        await raw.say(Heartbeat((("t2", 2),)))

        assert (await raw.hear(Abort)).transfer_id == "t1"
        await pair.sink.wait_ended("t1")
    assert pair.sink.released["t1"] == "unknown_transfer"


async def test_a_short_deadline_is_not_hidden_by_a_long_one(pair, connect):
    async with connect(pair) as raw:
        await raw.granted("patient")
        await raw.say(Offer("hasty", 2, tuple(pair.hashes(10)), 10, 100))
        await pair.sink.wait_ended("hasty")
        assert pair.sink.released == {"hasty": "deadline"}


async def test_a_peer_that_speaks_no_zeromq_disturbs_nobody(pair):
    host, port = pair.receiver.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")

    transfer = await pair.offer()
    await transfer.send_blocks(pair.blocks())
    await transfer.finish(b"")


async def test_a_sink_whose_reservation_is_cancelled_from_within_refuses(pair, connect):
    pair.sink.refusal = asyncio.CancelledError()
    async with connect(pair) as raw:
        await raw.greet()
        await raw.hear(Welcome)
        await raw.offer()

        refuse = await raw.hear(Refuse)

        assert (refuse.code, refuse.retryable) == ("reserve_failed", True)
        await asyncio.wait_for(pair.receiver.idle(), 30)


async def test_a_storm_of_random_frames_changes_nothing_for_others(pair, connect):
    chance = random.Random(11)
    messages = [encode(message) for message in (Credit(1, ()), Grant("t1", 1, ()), Heartbeat((("t9", 1),)))]
    async with connect(pair) as raw:
        for number in range(300):
            if number % 10 == 0:
                await raw.greet(node_id=f"storm-{number}")
            header = bytearray(chance.choice([chance.randbytes(chance.randrange(40)), *messages]))
            for _ in range(chance.randrange(3) if header else 0):
                header[chance.randrange(len(header))] = chance.randrange(256)
            await raw.say(bytes(header), *[chance.randbytes(9) for _ in range(chance.randrange(3))])

        transfer = await pair.offer()
        await transfer.send_blocks(pair.blocks())
        await transfer.finish(b"")

        async with asyncio.timeout(30):
            while pair.receiver.counts().failures.get("protocol", 0) <= 50:  # noqa: ASYNC110 - the storm goes on
                await asyncio.sleep(0.01)
    assert pair.receiver.counts().open == 0


async def test_it_listens_on_loopback_unless_told_otherwise(pair):
    assert pair.receiver.endpoint.startswith("tcp://127.0.0.1:")
    assert not pair.receiver.endpoint.endswith(":0")


async def test_an_address_in_use_is_an_error_at_once(pair, context):
    with pytest.raises(zmq.ZMQError):
        async with BlockReceiver.bind(
            context,
            pair.receiver.endpoint,
            node_id="decode-1",
            incarnation="d1",
            layout=pair.layout,
            sink=pair.sink,
        ):
            pass


@pytest.mark.parametrize("fault", ["checksum", "size", "credit"])
async def test_a_false_probe_ends_the_connection_and_is_counted(small, connect, fault):
    payload = bytes(4 * small.layout.block_size_bytes if fault == "credit" else 100)
    checksum = xxhash.xxh3_64_intdigest(payload) ^ (fault == "checksum")
    async with connect(small) as raw:
        await raw.greet()
        await raw.hear(Welcome)
        await raw.say(Probe(1, len(payload) + (fault == "size"), checksum), payload)

        assert (await raw.hear(Refused)).code == "protocol"
    assert small.receiver.counts().failures["protocol"] == 1
