"""A link is measured over the real plane, under credit, and says what is wrong with it."""

import asyncio
import json
from dataclasses import replace

import pytest

from pdserve.kvtransfer import (
    LayoutMismatch,
    PeerAddress,
    PeerLost,
    ReceiverConfig,
    SenderConfig,
    TransferError,
    TransferRefused,
    TransferTimeout,
    generate_keys,
)
from pdserve.kvtransfer.frames import Probe, encode

MIB = 2**20


async def test_a_link_is_measured_and_nothing_stays_behind(pair):
    first = await pair.sender.probe(pair.peer, 3 * MIB + 5, 60.0)
    second = await pair.sender.probe(pair.peer, 1, 60.0)

    assert first.num_bytes == 3 * MIB + 5 and first.bytes_per_s > 0 and first.round_trip_s > 0
    assert first.connect_s is not None and second.connect_s is None
    assert not first.is_encrypted
    assert not pair.sink.reserved
    assert pair.sender.counts().failures == pair.receiver.counts().failures == {}


async def test_an_encrypted_link_says_so(make_pair):
    keys = generate_keys()
    pair = await make_pair(receiver_config=ReceiverConfig(curve=keys), sender_config=SenderConfig(curve=keys))

    assert (await pair.sender.probe(pair.peer, MIB, 60.0)).is_encrypted


async def test_a_probe_is_content_with_the_smallest_window(make_pair, layout):
    pair = await make_pair(receiver_config=ReceiverConfig(credit_bytes=layout.block_size_bytes))

    assert (await pair.sender.probe(pair.peer, 10 * layout.block_size_bytes, 60.0)).bytes_per_s > 0


async def test_transfers_go_on_beside_a_probe_and_get_their_turn(make_pair, layout):
    pair = await make_pair(receiver_config=ReceiverConfig(credit_bytes=2 * layout.block_size_bytes))
    async with asyncio.TaskGroup() as group:
        probing = group.create_task(pair.sender.probe(pair.peer, MIB, 60.0))
        for number in range(5):
            transfer = await pair.offer(f"t{number}")
            await transfer.send_blocks(pair.blocks())
            await transfer.finish(b"")

    assert probing.result().num_bytes == MIB
    assert len(pair.sink.committed) == 5


async def test_one_probe_at_a_time(pair):
    async with asyncio.TaskGroup() as group:
        first = group.create_task(pair.sender.probe(pair.peer, MIB, 60.0))
        await asyncio.sleep(0)
        with pytest.raises(TransferRefused, match="another probe"):
            await pair.sender.probe(pair.peer, MIB, 60.0)
    assert first.result().num_bytes == MIB
    await pair.sender.probe(pair.peer, 1, 60.0)


@pytest.mark.parametrize("num_bytes", [0, -1, 65 * MIB])
async def test_a_probe_of_any_size_is_not_made(pair, num_bytes):
    with pytest.raises(ValueError, match="num_bytes"):
        await pair.sender.probe(pair.peer, num_bytes, 60.0)


async def test_a_receiver_that_stops_reading_costs_the_deadline_and_no_more(make_pair, process):
    pair = await make_pair()
    async with process(pair.layout, incarnation="d1", stall_s=50.0, num_hogs=0) as (child, words):
        peer = PeerAddress(words["endpoint"], "decode-0", "d1")
        await pair.sender.probe(peer, 1, 60.0)
        child.stdin.write(b"stall\n")
        assert json.loads(await asyncio.wait_for(child.stdout.readline(), 45)) == {"stalls": 50.0}

        with pytest.raises(TransferTimeout):
            await pair.sender.probe(peer, 32 * MIB, 0.5)
        child.kill()
        with pytest.raises(PeerLost):
            await pair.sender.probe(peer, MIB, 60.0)
    await pair.sender.probe(pair.peer, 1, 60.0)


@pytest.mark.parametrize(
    ("field", "value"), [("model_digest", "b"), ("model_revision", "v2"), ("tokenizer_digest", "b"), ("num_layers", 3)]
)
async def test_another_identity_is_named_by_its_field(make_pair, layout, field, value):
    ours = replace(layout, model_revision="v1", tokenizer_digest="a")
    pair = await make_pair(layout=ours, sender_layout=replace(ours, **{field: value}))

    with pytest.raises(LayoutMismatch) as caught:
        await pair.sender.probe(pair.peer, 1, 60.0)

    assert caught.value.field == field


async def test_another_start_of_the_receiver_is_another_node(pair):
    with pytest.raises(TransferRefused) as caught:
        await pair.sender.probe(replace(pair.peer, incarnation="d0"), 1, 60.0)

    assert caught.value.code == "wrong_node"


async def test_a_strangers_key_is_told(make_pair):
    pair = await make_pair(
        receiver_config=ReceiverConfig(curve=generate_keys()), sender_config=SenderConfig(curve=generate_keys())
    )

    with pytest.raises(TransferError, match="keys"):
        await pair.sender.probe(pair.peer, 1, 60.0)


def test_a_probe_has_no_room_for_more():
    with pytest.raises(ValueError, match="num_bytes"):
        encode(Probe(1, MIB + 1, 0))
