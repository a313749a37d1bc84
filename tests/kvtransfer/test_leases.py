"""A transfer lives as long as the processes of both its ends do, whatever those are busy with."""

import asyncio
import json

import pytest

from pdserve.kvtransfer import PeerAddress, ReceiverConfig, SenderConfig

pytestmark = pytest.mark.timeout(180)


async def test_a_sender_too_busy_to_speak_for_many_leases_keeps_its_hundred_transfers(make_pair, process):
    pair = await make_pair(receiver_config=ReceiverConfig(lease_s=1.0))
    address = [pair.receiver.endpoint, "decode-0", "d1"]
    job = {"peer": address, "num_transfers": 100, "num_early": 0, "stall_s": 3.0, "num_hogs": 2}
    async with process(pair.layout, **job) as (child, words):
        assert words == {"granted": 100}

        words = json.loads(await asyncio.wait_for(child.stdout.readline(), 45))

        assert words == {"finished": 100}
    assert len(pair.sink.committed) == 100 and not pair.sink.released


async def test_a_receiver_too_busy_to_speak_for_many_leases_keeps_its_hundred_transfers(make_pair, process):
    pair = await make_pair(sender_config=SenderConfig(lease_s=1.0))
    async with process(pair.layout, incarnation="d1", stall_s=3.0, num_hogs=2) as (child, words):
        peer = PeerAddress(words["endpoint"], "decode-0", "d1")
        transfers = [await pair.offer(f"t{number}", peer=peer, deadline_s=60.0) for number in range(100)]
        for transfer in transfers:
            await transfer.granted()
        child.stdin.write(b"stall\n")

        assert json.loads(await asyncio.wait_for(child.stdout.readline(), 45)) == {"stalls": 3.0}
        assert json.loads(await asyncio.wait_for(child.stdout.readline(), 45)) == {"stalled": 3.0}

        async with asyncio.timeout(45):
            for transfer in transfers:
                await transfer.send_blocks(pair.blocks())
                await transfer.finish(b"")
    assert pair.sender.counts().failures == {}


async def test_a_granted_transfer_may_wait_for_many_leases_beside_busy_ones(make_pair):
    pair = await make_pair(receiver_config=ReceiverConfig(lease_s=0.5))
    waiting = [await pair.offer(f"waiting{number}", deadline_s=60.0) for number in range(100)]
    loop = asyncio.get_running_loop()
    start = loop.time()

    number = 0
    while loop.time() < start + 3.0:  # 6 leases
        number += 1
        async with await pair.offer(f"t{number}") as transfer:
            await transfer.send_blocks(pair.blocks())
            await transfer.finish(b"")

    for transfer in waiting:
        assert transfer.error is None
        await transfer.send_blocks(pair.blocks())
        await transfer.finish(b"")
    assert pair.receiver.counts().failures == {}
