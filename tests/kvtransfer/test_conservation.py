"""Many transfers at once: nothing is lost, nothing is held, nobody waits for a stranger."""

import asyncio
import gc
import random

import pytest

from pdserve.kvtransfer import BlockReceiver, PeerAddress, ReceiverConfig, SenderConfig, TransferError


@pytest.mark.timeout(120)
async def test_a_thousand_transfers_with_random_aborts_end_exactly_once_each(make_pair, layout):  # C141
    pair = await make_pair(
        receiver_config=ReceiverConfig(credit_bytes=8 * layout.block_size_bytes),
        sender_config=SenderConfig(max_message_bytes=2 * layout.block_size_bytes),
    )
    chance = random.Random(7)
    outcomes = {}

    async def one(transfer_id, plan, pauses):
        transfer = await pair.offer(transfer_id, num_tokens=40, deadline_s=60.0)
        try:
            await _pause(pauses[0])
            if plan == "abort early":
                await transfer.abort("early", "")
            await transfer.granted()
            for index, block in pair.blocks(40):
                if plan == "abort between" and index == 5:
                    await transfer.abort("between", "")
                if plan == "receiver aborts" and index == 6:
                    await pair.receiver.abort(transfer_id, "cancelled", "")
                await transfer.send_blocks([(index, block)])
                await _pause(pauses[1])
            if plan == "abort late":
                finishing = asyncio.ensure_future(transfer.finish(b""))
                await _pause(pauses[2])
                await transfer.abort("late", "")
                await finishing
            else:
                await transfer.finish(b"")
            outcomes[transfer_id] = "committed"
        except TransferError as error:
            outcomes[transfer_id] = error.code

    plans = ["plain", "plain", "abort early", "abort between", "abort late", "receiver aborts"]
    for first in range(0, 1_000, 100):
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for number in range(first, first + 100):
                pauses = [chance.randrange(4) for _ in range(3)]
                group.create_task(one(f"t{number}", chance.choice(plans), pauses))
    await asyncio.wait_for(pair.receiver.idle(), 30)

    sink = pair.sink
    assert len(outcomes) == 1_000
    assert {"committed", "early", "between", "cancelled"} <= set(outcomes.values())
    assert not set(sink.committed) & set(sink.released)
    assert set(sink.reserved) == set(sink.committed) | set(sink.released)
    for transfer_id in sink.committed:
        assert sink.landed[transfer_id] == dict(pair.blocks(40))
    assert {name for name, outcome in outcomes.items() if outcome == "committed"} <= set(sink.committed)
    assert pair.sender.counts().open == pair.receiver.counts().open == 0
    # All the credit is back: a transfer as large as the window goes through in one go.
    last = await pair.offer("last", num_tokens=32)
    await last.send_blocks(pair.blocks(32))
    await last.finish(b"")


async def test_a_slow_receiver_makes_the_sender_wait_not_grow(make_pair, layout):
    window = 4 * layout.block_size_bytes
    pair = await make_pair(receiver_config=ReceiverConfig(credit_bytes=window))
    pair.sink.may_land.clear()
    transfers = [await pair.offer(f"t{number}", num_tokens=40) for number in range(5)]
    sending = [asyncio.ensure_future(transfer.send_blocks(pair.blocks(40))) for transfer in transfers]
    await asyncio.wait_for(pair.sink.land_started.wait(), 30)
    probe = await pair.offer("probe")  # behind everything that was sent on this connection
    await probe.granted()

    assert pair.sender.counts().bytes_sent == window
    assert not any(task.done() for task in sending)

    pair.sink.may_land.set()
    await asyncio.wait_for(asyncio.gather(*sending), 30)
    for transfer in transfers:
        await transfer.finish(b"")
    assert pair.sender.counts().bytes_sent == 50 * layout.block_size_bytes


async def test_blocks_are_taken_from_a_generator_only_as_credit_allows(make_pair, layout):
    pair = await make_pair(
        receiver_config=ReceiverConfig(credit_bytes=4 * layout.block_size_bytes),
        sender_config=SenderConfig(max_message_bytes=2 * layout.block_size_bytes),
    )
    pair.sink.may_land.clear()
    taken = []

    def blocks():
        for index, block in pair.blocks(80):
            taken.append(index)
            yield index, block

    transfer = await pair.offer(num_tokens=80)
    sending = asyncio.ensure_future(transfer.send_blocks(blocks()))
    await asyncio.wait_for(pair.sink.land_started.wait(), 30)
    probe = await pair.offer("probe")
    await probe.granted()

    assert len(taken) == 4  # the credit, and nothing that waits for more
    pair.sink.may_land.set()
    await asyncio.wait_for(sending, 30)
    await transfer.finish(b"")
    assert pair.sink.landed["t1"] == dict(pair.blocks(80))


async def test_an_abort_wakes_a_sender_that_waits_for_credit(make_pair, layout):
    pair = await make_pair(receiver_config=ReceiverConfig(credit_bytes=layout.block_size_bytes))
    pair.sink.may_land.clear()
    transfer = await pair.offer(num_tokens=40)
    sending = asyncio.ensure_future(transfer.send_blocks(pair.blocks(40)))
    await asyncio.wait_for(pair.sink.land_started.wait(), 30)

    await transfer.abort("cancelled", "")

    async with asyncio.timeout(30):
        try:
            await sending
            raise AssertionError("sent without credit")
        except TransferError as error:
            assert error.code == "cancelled"
    pair.sink.may_land.set()
    other = await pair.offer("t2")
    await other.send_blocks(pair.blocks())
    await other.finish(b"")


async def test_a_slow_receiver_does_not_slow_another(make_pair, make_sink, layout):
    pair = await make_pair(receiver_config=ReceiverConfig(credit_bytes=layout.block_size_bytes))
    pair.sink.may_land.clear()
    slow = await pair.offer("slow", num_tokens=40)
    sending = asyncio.ensure_future(slow.send_blocks(pair.blocks(40)))
    await asyncio.wait_for(pair.sink.land_started.wait(), 30)
    async with BlockReceiver.bind(
        pair.context, node_id="decode-1", incarnation="d1", layout=layout, sink=make_sink()
    ) as receiver:
        fast = await pair.offer("fast", peer=PeerAddress(receiver.endpoint, "decode-1", "d1"))
        await fast.send_blocks(pair.blocks())
        await asyncio.wait_for(fast.finish(b""), 30)

    assert not sending.done()
    pair.sink.may_land.set()
    await asyncio.wait_for(sending, 30)
    await slow.finish(b"")


async def test_nothing_stays_behind_after_many_transfers(make_pair):  # C127
    pair = await make_pair()

    async def some(count, first):
        for number in range(first, first + count):
            transfer = await pair.offer(f"t{number}")
            await transfer.send_blocks(pair.blocks())
            await (transfer.abort("x", "") if number % 3 == 0 else transfer.finish(b""))
            pair.sink.landed.pop(f"t{number - 50}", None)
        await pair.receiver.idle()
        pair.sink.landed.clear()
        pair.sink.reserved.clear()
        pair.sink.committed.clear()
        pair.sink.released.clear()
        gc.collect()
        return len(gc.get_objects())

    await some(60, 0)
    before = await some(60, 100)
    after = await some(300, 1_000)

    assert after - before < 300
    assert len(asyncio.all_tasks()) < 12


async def _pause(num_turns):
    for _ in range(num_turns):
        await asyncio.sleep(0)
