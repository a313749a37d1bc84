"""Blocks between processes of one machine through memory that both share, and what happens when there is none."""

import asyncio
import gc
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pdserve.kvtransfer import IntegrityError, PeerAddress, ReceiverConfig, SenderConfig, hash_blocks
from pdserve.kvtransfer.ring_door import hand_over_ring
from pdserve.kvtransfer.ring_probe import ProbedRates, probed_rates
from pdserve.kvtransfer.shared_ring import RingShape, RingView, SharedRing, UnusableRing

ALWAYS = SenderConfig(shared_memory="always")


def _ring_of(pair):
    return pair.sender._connections[pair.peer].ring


def _shared_memories():
    """Count the mappings of shared memory in this process, and name what lies in /dev/shm."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:kvtransfer"), [name for name in os.listdir("/dev/shm") if "kvtransfer" in name]


async def _send(pair, transfer_id="t1"):
    transfer = await pair.offer(transfer_id)
    await transfer.send_blocks(pair.blocks())
    await transfer.finish(b"")


@pytest.mark.parametrize("shared_memory", ["always", "never"])
async def test_blocks_arrive_alike_with_and_without_shared_memory(make_pair, shared_memory):
    pair = await make_pair(sender_config=SenderConfig(shared_memory=shared_memory))

    await _send(pair)

    assert pair.sink.landed["t1"] == dict(pair.blocks())
    shared = 3 * pair.layout.block_size_bytes if shared_memory == "always" else 0
    assert pair.sender.counts().bytes_shared == pair.receiver.counts().bytes_shared == shared
    assert pair.sender.counts().bytes_sent == 3 * pair.layout.block_size_bytes


async def test_what_is_measured_to_be_faster_is_taken(make_pair, monkeypatch):
    assert ProbedRates(shared=2.0, socket=1.0).prefers_shared and not ProbedRates(1.0, 2.0).prefers_shared
    rates = probed_rates()
    assert rates is probed_rates() and rates.shared > 0 and rates.socket > 0
    for rates, is_shared in ((ProbedRates(2.0, 1.0), True), (ProbedRates(1.0, 2.0), False)):
        monkeypatch.setattr("pdserve.kvtransfer.ring_choice.probed_rates", partial(replace, rates))
        pair = await make_pair()
        await _send(pair)
        assert (pair.sender.counts().bytes_shared > 0) is is_shared
        assert pair.sender.counts().shared_memory_failures == 0


async def test_a_sender_without_memory_to_share_goes_on_over_its_socket_and_counts_it(make_pair):
    pair = await make_pair(sender_config=SenderConfig(shared_memory="always", ring_bytes=1))  # not one block fits

    await _send(pair)

    assert pair.sink.landed["t1"] == dict(pair.blocks())
    assert pair.sender.counts().bytes_shared == 0
    assert pair.sender.counts().shared_memory_failures == 1


async def test_a_system_that_has_none_left_is_no_failure_of_a_transfer(make_pair, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    pair = await make_pair(sender_config=ALWAYS)

    await _send(pair)

    assert (pair.sender.counts().completed, pair.sender.counts().shared_memory_failures) == (1, 1)


async def test_a_receiver_that_does_not_share_is_none_to_ask(make_pair):
    pair = await make_pair(sender_config=ALWAYS, receiver_config=ReceiverConfig(uses_shared_memory=False))

    await _send(pair)

    assert (pair.sender.counts().bytes_shared, pair.sender.counts().shared_memory_failures) == (0, 0)


async def test_more_than_the_ring_holds_travels_both_ways_and_every_slot_comes_back(make_pair, layout):
    size = layout.block_size_bytes
    pair = await make_pair(sender_config=SenderConfig(shared_memory="always", ring_bytes=4 * size, max_message_bytes=1))
    pair.sink.may_land.clear()
    transfer = await pair.offer(num_tokens=40)
    await transfer.granted()
    assert _ring_of(pair).shape == RingShape(4, pair.layout.block_size_bytes)

    await transfer.send_layers(pair.blocks(40)[:6], 1)  # more pieces than slots, within the credit

    assert _ring_of(pair).num_free == 0
    assert (pair.sender.counts().bytes_shared, pair.sender.counts().bytes_sent) == (4 * size // 2, 6 * size // 2)
    pair.sink.may_land.set()
    await transfer.send_blocks(pair.blocks(40))
    await transfer.finish(b"")
    assert pair.sink.landed["t1"] == dict(pair.blocks(40))
    assert (_ring_of(pair).num_free, _ring_of(pair).num_in_use) == (4, 0)


async def test_layers_are_due_over_shared_memory_once_there_are_enough_of_them(make_pair):
    pair = await make_pair(sender_config=ALWAYS)
    transfer = await pair.offer()
    await transfer.granted()
    layer_bytes = pair.layout.block_size_bytes // 2

    assert not transfer.are_layers_due(range(3), 1, 3 * layer_bytes + 1)
    assert transfer.are_layers_due(range(3), 1, 3 * layer_bytes)
    await transfer.send_layers(pair.blocks()[:2], 1)
    assert not transfer.are_layers_due(range(3), 1, layer_bytes + 1)  # what has been sent does not count
    assert transfer.are_layers_due(range(3), 2, 4 * layer_bytes)


@pytest.mark.parametrize("changes", [{"block_size": 2}, {"block_size": 8}, {"dtype": "int8"}])
@pytest.mark.parametrize("shared_memory", ["always", "never"])
async def test_no_layers_are_due_of_blocks_that_the_wire_has_otherwise(make_pair, layout, changes, shared_memory):
    """The indexes are of the sender's blocks, of which there may be more than of the wire's."""
    own = replace(layout, **changes)
    pair = await make_pair(sender_config=SenderConfig(shared_memory=shared_memory), sender_layout=own)
    hashes = partial(hash_blocks, range(10), salt="", model_digest=layout.model_digest)
    transfer = await pair.sender.offer(pair.peer, "t1", hashes, 10, 30.0)
    await transfer.granted()

    assert not transfer.are_layers_due(range(-(-10 // own.block_size)), 1, 1)


async def test_layers_are_due_at_once_where_they_travel_in_frames(make_pair):
    pair = await make_pair(sender_config=SenderConfig(shared_memory="never"))
    transfer = await pair.offer()
    await transfer.granted()

    assert transfer.are_layers_due(range(3), 1, 1 + pair.layout.block_size_bytes * 3)


@pytest.mark.parametrize("shared_memory", ["always", "never"])
async def test_layers_are_awaited_where_they_can_be_due(make_pair, shared_memory):
    pair = await make_pair(sender_config=SenderConfig(shared_memory=shared_memory))
    size, num_tokens = pair.layout.block_size_bytes, 2 * pair.layout.block_size
    assert pair.sender.may_send_layers(pair.peer, num_tokens, 1 << 40)  # nothing is known of the receiver

    await _send(pair)

    is_socket = shared_memory == "never"
    assert pair.sender.may_send_layers(pair.peer, num_tokens, 2 * size) is is_socket
    assert pair.sender.may_send_layers(pair.peer, num_tokens, 2 * size - 1)
    assert pair.sender.may_send_layers(pair.peer, num_tokens + 1, 2 * size)


@pytest.mark.parametrize("num_sent", [0, 1, 2, 3])
@pytest.mark.parametrize("aborts_first", [True, False])
async def test_an_abort_at_any_point_gives_every_slot_back(make_pair, num_sent, aborts_first):
    pair = await make_pair(sender_config=ALWAYS)
    pair.sink.may_land.clear()
    transfer = await pair.offer()
    await transfer.granted()
    await transfer.send_blocks(pair.blocks()[:num_sent])
    if num_sent:
        await asyncio.wait_for(pair.sink.land_started.wait(), 30)

    if aborts_first:
        await transfer.abort("cancelled", "the client has gone")
    else:
        await pair.receiver.abort("t1", "cancelled", "the task has ended")
    pair.sink.may_land.set()

    await pair.sink.wait_ended("t1")
    assert pair.sink.released == {"t1": "cancelled"}
    await _send(pair, "t2")  # what it gets back comes after what was freed before
    ring = _ring_of(pair)
    assert (ring.num_free, ring.num_in_use) == (ring.shape.num_slots, 0)
    assert pair.sink.landed["t2"] == dict(pair.blocks())


async def test_bytes_that_change_in_shared_memory_fail_the_transfer_by_name(make_pair):
    pair = await make_pair(sender_config=ALWAYS)
    transfer = await pair.offer()
    await transfer.granted()
    ring = _ring_of(pair)
    put = ring.put

    def put_wrongly(payload):
        slot = put(payload)
        ring._view[slot * ring.shape.slot_size_bytes + 5] ^= 1
        return slot

    ring.put = put_wrongly
    await transfer.send_blocks(pair.blocks())

    with pytest.raises(IntegrityError) as caught:
        await transfer.finish(b"")
    assert caught.value.code == "wrong_checksum"
    await pair.sink.wait_ended("t1")
    assert pair.sink.landed["t1"] == {}
    assert pair.receiver.counts().failures["wrong_checksum"] == pair.sender.counts().failures["wrong_checksum"] == 1


@pytest.mark.parametrize("is_sender", [True, False])
async def test_whoever_is_killed_nothing_of_the_memory_stays(make_pair, process, is_sender):
    pair = await make_pair(sender_config=ALWAYS)
    before = _shared_memories()
    if is_sender:
        address = [pair.receiver.endpoint, "decode-0", "d1"]
        role = {"peer": address, "num_transfers": 2, "shared_memory": "always"}
    else:
        role = {"incarnation": "d9"}
    async with process(pair.layout, **role) as (child, words):
        if is_sender:
            assert words == {"granted": 2}
        else:
            transfer = await pair.offer(peer=PeerAddress(words["endpoint"], "decode-0", "d9"))
            await transfer.send_blocks(pair.blocks()[:1])
        assert _shared_memories()[0] == before[0] + 1

        child.send_signal(signal.SIGKILL)
        await child.wait()

        if is_sender:
            await pair.sink.wait_ended("t1")
            await asyncio.wait_for(pair.receiver.idle(), 30)
        else:
            assert (await transfer.closed()).code == "peer_lost"
            await pair.sender._tasks.wait(30)  # the memory goes with the task that served the connection
    assert _shared_memories() == before


async def test_memory_is_taken_only_from_who_was_told_the_token(pair):
    await _send(pair)
    (peer,) = pair.receiver._peers.values()
    peer.ring = None
    name, shape = pair.receiver._door.name, RingShape(2, 4096)

    with pytest.raises(UnusableRing):
        await hand_over_ring(name, bytes(16), shape)
    assert peer.ring is None
    await hand_over_ring(name, peer.ring_token, shape)
    assert peer.ring.shape == shape
    with pytest.raises(UnusableRing):  # once
        await hand_over_ring(name, peer.ring_token, shape)


async def test_a_caller_that_says_nonsense_is_hung_up_on(pair):
    name = pair.receiver._door.name
    reader, writer = await asyncio.open_unix_connection(f"\0{name}")
    writer.write(b"nonsense" * 4)

    assert await asyncio.wait_for(reader.read(), 30) == b""

    writer.close()
    await writer.wait_closed()
    await _send(pair)


def test_a_ring_hands_out_each_slot_once_and_the_one_freed_last_first():
    ring, descriptor = SharedRing.create(RingShape(3, 4096))
    try:
        view = RingView.open(descriptor, RingShape(3, 4096))
        slots = [ring.put(memoryview(bytes([number]) * 4096)) for number in range(3)]
        assert sorted(slots) == [0, 1, 2] and ring.num_free == 0
        assert [bytes(each) for each in view.payloads(tuple(slots), (1, 2, 3))] == [b"\0", b"\1\1", b"\2\2\2"]

        assert ring.free((slots[1],)) and not ring.free((slots[1],)) and not ring.free((slots[0], slots[0]))

        assert ring.put(memoryview(b"x")) == slots[1]
        assert (ring.num_free, ring.num_in_use) == (0, 3)
        assert view.payloads((3,), (1,)) is None and view.payloads((0,), (4097,)) is None
        with pytest.raises(TypeError):
            view.payloads((0,), (1,))[0][0] = 1
    finally:
        os.close(descriptor)


def test_memory_that_could_be_made_shorter_is_not_mapped():
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, 4096)
        with pytest.raises(UnusableRing):
            RingView.open(descriptor, RingShape(1, 4096))
    finally:
        os.close(descriptor)
    _, descriptor = SharedRing.create(RingShape(1, 4096))
    try:
        with pytest.raises(OSError):
            os.ftruncate(descriptor, 0)
        with pytest.raises(UnusableRing):
            RingView.open(descriptor, RingShape(2, 4096))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(("num_slots", "slot_size_bytes"), [(0, 1), (1, 0), (1025, 1), (1, 2**30 + 1)])
def test_a_ring_has_bounds(num_slots, slot_size_bytes):
    with pytest.raises(UnusableRing):
        RingShape(num_slots, slot_size_bytes)
