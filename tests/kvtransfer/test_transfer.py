"""Whole transfers over real sockets: the path that works, and every way to end early."""

import asyncio
import socket
import time

import pytest
import zmq.asyncio

from pdserve.kvtransfer import (
    BlockReceiver,
    BlockSender,
    InvalidTransition,
    LayoutMismatch,
    PeerAddress,
    PeerLost,
    ReceiverConfig,
    SenderConfig,
    TransferAborted,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from pdserve.kvtransfer.layout import KVLayout


async def test_blocks_and_metadata_arrive_as_they_were_sent(pair):
    transfer = await pair.offer(num_tokens=10)

    assert await transfer.granted() == (0, 1, 2)
    await transfer.send_blocks(pair.blocks())
    await transfer.finish(b"first token")

    assert pair.sink.landed["t1"] == dict(pair.blocks())
    assert pair.sink.committed == {"t1": b"first token"}
    assert await transfer.closed() is None
    sent, received = pair.sender.counts(), pair.receiver.counts()
    assert sent.bytes_sent == received.bytes_received == 3 * pair.layout.block_size_bytes
    assert sent.blocks_sent == received.blocks_received == 3
    assert (sent.open, received.open, sent.completed, received.completed) == (0, 0, 1, 1)


async def test_blocks_may_leave_one_by_one_in_any_order(pair):
    transfer = await pair.offer(num_tokens=10)

    for index, block in reversed(pair.blocks()):
        await transfer.send_blocks([(index, memoryview(block))])
    await transfer.finish(b"")

    assert pair.sink.landed["t1"] == dict(pair.blocks())


async def test_blocks_that_the_receiver_has_are_skipped(pair):
    pair.sink.present = {*pair.hashes(10)[:2]}
    transfer = await pair.offer(num_tokens=10)

    assert await transfer.granted() == (2,)
    await transfer.send_blocks(pair.blocks())
    await transfer.finish(b"")

    assert set(pair.sink.landed["t1"]) == {2}
    assert pair.sender.counts().blocks_skipped == 2
    assert pair.sender.counts().bytes_sent == pair.layout.block_size_bytes


async def test_a_transfer_of_nothing_commits(pair):
    pair.sink.present = {*pair.hashes(10)}
    transfer = await pair.offer(num_tokens=10)

    assert await transfer.granted() == ()
    await transfer.finish(b"all here")

    assert pair.sink.committed == {"t1": b"all here"}


async def test_finish_before_all_needed_blocks_is_the_callers_mistake(pair):
    transfer = await pair.offer(num_tokens=10)
    await transfer.send_blocks(pair.blocks()[:2])

    with pytest.raises(InvalidTransition, match="1 needed blocks unsent"):
        await transfer.finish(b"")
    await transfer.abort("gave_up", "")
    await pair.sink.wait_ended("t1")


async def test_a_buffer_of_the_wrong_size_is_not_sent(pair):
    transfer = await pair.offer()

    with pytest.raises(ValueError, match="block 0"):
        await transfer.send_blocks([(0, b"short")])
    await transfer.send_blocks(pair.blocks())
    await transfer.finish(b"")


async def test_any_contiguous_buffer_of_a_block_will_do(pair):
    size = pair.layout.block_size_bytes
    shaped = memoryview(bytearray(pair.block(0))).toreadonly().cast("B", (2, size // 2))
    floats = memoryview(pair.block(1)).cast("f")
    transfer = await pair.offer()

    await transfer.send_blocks([(0, shaped), (1, floats), (2, pair.block(2))])
    await transfer.finish(b"")

    assert pair.sink.landed["t1"] == dict(pair.blocks())


async def test_a_buffer_with_gaps_is_not_sent(pair):
    transfer = await pair.offer()

    with pytest.raises(ValueError, match="contiguous"):
        await transfer.send_blocks([(0, memoryview(pair.block(0) * 2)[::2])])
    await transfer.abort("done", "")


async def test_a_block_outside_the_offer_is_the_callers_mistake(pair):
    transfer = await pair.offer()

    with pytest.raises(ValueError, match="block 3 is outside"):
        await transfer.send_blocks([(3, pair.block(3))])
    await transfer.abort("done", "")


async def test_the_same_block_twice_is_the_callers_mistake(pair):
    transfer = await pair.offer()
    await transfer.send_blocks(pair.blocks())

    with pytest.raises(InvalidTransition, match="sent before"):
        await transfer.send_blocks(pair.blocks()[:1])
    await transfer.finish(b"")


async def test_an_offer_whose_hashes_do_not_fit_its_tokens_is_not_made(pair):
    with pytest.raises(ValueError, match="11 tokens"):
        await pair.sender.offer(pair.peer, "t1", pair.hashes(4), 11, 5.0)


@pytest.mark.parametrize("deadline_s", [float("inf"), float("nan"), 8 * 24 * 3600.0])
async def test_a_deadline_that_cannot_be_said_is_the_callers_mistake(pair, deadline_s):
    with pytest.raises(ValueError, match="deadline_s must be at most 604800"):
        await pair.offer(deadline_s=deadline_s)
    assert pair.sender.counts().open == 0


@pytest.mark.parametrize("end", ["node_id", "incarnation"])
@pytest.mark.parametrize("name", ["", "é" * 65])
async def test_a_name_that_no_handshake_can_say_is_refused_where_it_is_given(pair, end, name):
    names = {"node_id": "x", "incarnation": "1", end: name}

    with pytest.raises(ValueError, match=f"{end} must be text of 1..128 bytes"):
        BlockSender(pair.context, layout=pair.layout, **names)
    with pytest.raises(ValueError, match=f"{end} must be text of 1..128 bytes"):
        async with BlockReceiver.bind(pair.context, layout=pair.layout, sink=pair.sink, **names):
            pass
    with pytest.raises(ValueError, match=f"{end} must be text of 1..128 bytes"):
        PeerAddress("tcp://127.0.0.1:1", **names)


async def test_the_longest_words_of_an_end_reach_the_other_shortened(pair):
    pair.sink.refusal = TransferRefused("é" * 64, "ü" * 2_000, retryable=True)
    with pytest.raises(TransferRefused) as caught:
        await (await pair.offer()).granted()
    assert (caught.value.code, caught.value.message) == ("é" * 32, "ü" * 512)
    pair.sink.refusal = None
    transfer = await pair.offer("t2")
    await transfer.granted()

    await transfer.abort("ö" * 64, "ä" * 2_000)

    await pair.sink.wait_ended("t2")
    assert pair.sink.released == {"t2": "ö" * 32}
    assert pair.sender.counts().open == 0


async def test_the_sink_refuses_with_its_own_words(pair, refusal):
    pair.sink.refusal = refusal
    transfer = await pair.offer()

    with pytest.raises(TransferRefused, match="the pool is full") as caught:
        await transfer.granted()

    assert (caught.value.code, caught.value.retryable) == ("no_blocks", True)
    assert pair.sender.counts().failures == {"refused": 1}
    assert pair.sender.counts().open == 0
    assert not pair.sink.released


async def test_a_failing_reserve_is_a_refusal(pair):
    pair.sink.refusal = KeyError("bug in the sink")
    transfer = await pair.offer()

    with pytest.raises(TransferRefused) as caught:
        await transfer.granted()
    assert caught.value.code == "reserve_failed"


async def test_a_reservation_that_waits_does_not_hold_up_another(pair):
    pair.sink.may_reserve.clear()
    waiting = await pair.offer("waits")
    async with asyncio.timeout(30):
        await pair.sink.reserve_started.wait()
    pair.sink.may_reserve.set()
    other = await pair.offer("other")
    await other.send_blocks(pair.blocks())
    await other.finish(b"")
    await waiting.granted()
    await waiting.abort("done", "")
    await pair.sink.wait_ended("waits")


@pytest.mark.parametrize("stage", ["reserving", "granted", "landing", "finishing"])
async def test_the_sender_aborts_at_any_stage(pair, stage):
    transfer = await _reach(pair, stage)

    await transfer.abort("client_gone", "nobody reads")
    await transfer.abort("client_gone", "again")

    error = await transfer.closed()
    assert isinstance(error, TransferAborted) and error.code == "client_gone" and not error.by_peer
    with pytest.raises(TransferAborted):
        await transfer.granted()
    _open_gates(pair)
    await _settled(pair)
    if stage == "reserving":
        assert pair.sink.cancelled_reserves == ["t1"] and not pair.sink.reserved
    elif stage == "finishing":  # the commit had begun: the receiver owns the blocks
        assert set(pair.sink.committed) == {"t1"} and not pair.sink.released
    else:
        assert pair.sink.released == {"t1": "client_gone"}


@pytest.mark.parametrize("stage", ["reserving", "granted", "landing", "finishing"])
async def test_the_receiver_aborts_at_any_stage(pair, stage):
    transfer = await _reach(pair, stage)
    waiting = asyncio.ensure_future(transfer.closed())

    await pair.receiver.abort("t1", "cancelled", "the gateway cancelled")
    _open_gates(pair)
    error = await asyncio.wait_for(waiting, 30)

    if stage == "finishing":
        assert error is None
    else:
        assert isinstance(error, TransferAborted) and error.code == "cancelled" and error.by_peer
        with pytest.raises(TransferAborted):
            await transfer.send_blocks(pair.blocks())
    await _settled(pair)
    assert set(pair.sink.reserved) == set(pair.sink.released) | set(pair.sink.committed)


async def test_abort_of_an_unknown_transfer_changes_nothing(pair):
    await pair.receiver.abort("no such", "cancelled", "")

    assert pair.receiver.counts().failures == {}


async def test_a_transfer_id_can_be_used_again_after_an_abort(pair):
    first = await pair.offer()
    await first.granted()
    await pair.receiver.abort("t1", "cancelled", "")
    await first.closed()
    await _settled(pair)
    pair.sink.released.clear()

    again = await pair.offer()
    await again.send_blocks(pair.blocks())
    await again.finish(b"")

    assert set(pair.sink.committed) == {"t1"}


async def test_an_open_transfer_id_is_not_offered_twice(pair):
    transfer = await pair.offer()

    with pytest.raises(TransferRefused) as caught:
        await pair.offer()
    assert caught.value.code == "duplicate_transfer"
    await transfer.abort("done", "")


async def test_a_failed_write_aborts_the_transfer(pair):
    async def broken_land(transfer_id, blocks):
        raise OSError("slot is gone")

    pair.sink.land = broken_land
    transfer = await pair.offer()
    await transfer.send_blocks(pair.blocks())

    with pytest.raises(TransferAborted) as caught:
        await transfer.finish(b"")
    assert caught.value.code == "land_failed"
    await _settled(pair)
    assert pair.sink.released == {"t1": "land_failed"}


async def test_a_write_that_is_not_wanted_any_more_is_an_ordinary_end(pair, caplog):
    async def unwanted(transfer_id, blocks, start):
        raise TransferRefused("cancelled", "the task has ended")

    pair.sink.land = unwanted
    transfer = await pair.offer()
    await transfer.send_blocks(pair.blocks())

    with pytest.raises(TransferAborted) as caught:
        await transfer.finish(b"")
    assert (caught.value.code, caught.value.message) == ("cancelled", "the task has ended")
    await _settled(pair)
    assert pair.sink.released == {"t1": "cancelled"}
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_commit_that_is_not_wanted_any_more_is_an_ordinary_end(pair, caplog):
    async def unwanted(transfer_id, metadata):
        raise TransferRefused("cancelled", "the task has ended")

    pair.sink.commit = unwanted
    transfer = await pair.offer()
    await transfer.send_blocks(pair.blocks())

    with pytest.raises(TransferAborted) as caught:
        await transfer.finish(b"")
    assert caught.value.code == "commit_failed" and "the task has ended" in caught.value.message
    await _settled(pair)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_failed_commit_is_an_abort_without_release(pair):
    async def broken_commit(transfer_id, metadata):
        raise ValueError("bad metadata")

    pair.sink.commit = broken_commit
    transfer = await pair.offer()
    await transfer.send_blocks(pair.blocks())

    with pytest.raises(TransferAborted) as caught:
        await transfer.finish(b"")
    assert caught.value.code == "commit_failed"
    assert not pair.sink.released


async def test_the_deadline_ends_both_ends(pair):
    await _connected(pair)
    transfer = await pair.offer(deadline_s=3.0)
    await transfer.granted()

    error = await asyncio.wait_for(transfer.closed(), 30)

    assert isinstance(error, TransferTimeout)
    await _settled(pair)
    assert pair.sink.released == {"t1": "deadline"}


async def test_a_write_that_hangs_ends_at_the_deadline(pair):
    await _connected(pair)
    pair.sink.may_land.clear()
    transfer = await pair.offer(deadline_s=3.0)
    await transfer.send_blocks(pair.blocks())

    with pytest.raises(TransferTimeout):
        await transfer.finish(b"")
    await _settled(pair)
    assert pair.sink.released == {"t1": "deadline"}


async def test_layouts_that_no_conversion_bridges_are_refused_naming_the_field(make_pair):
    other = KVLayout("model-a", num_layers=2, block_size=4, num_kv_heads=1, head_dim=32, dtype="float32")
    pair = await make_pair(sender_layout=other)

    with pytest.raises(LayoutMismatch, match="head_dim differs: ours is 32, theirs is 64") as caught:
        await pair.offer()
    assert (caught.value.field, caught.value.retryable) == ("head_dim", False)
    assert pair.receiver.counts().failures == {"layout_mismatch": 1}
    assert pair.sender.counts().failures == {"layout_mismatch": 1}


async def test_a_receiver_of_another_incarnation_is_not_talked_to(pair):
    old = PeerAddress(pair.receiver.endpoint, "decode-0", "d0")

    with pytest.raises(TransferRefused, match="d1") as caught:
        await pair.offer(peer=old)
    assert (caught.value.code, caught.value.retryable) == ("wrong_node", True)


async def test_nobody_at_the_endpoint_is_learned_at_once(pair):
    async with asyncio.timeout(30):
        with pytest.raises(PeerLost, match="nobody listens there"):
            await pair.offer(peer=PeerAddress("tcp://127.0.0.1:1", "decode-0", "d1"))
    assert pair.sender.counts().failures == {"peer_lost": 1}
    await pair.offer()


async def test_an_endpoint_that_is_none_is_a_lost_peer(pair):
    with pytest.raises(PeerLost, match="nonsense"):
        await pair.offer(peer=PeerAddress("nonsense", "decode-0", "d1"))


async def test_a_peer_that_accepts_and_stays_silent_does_not_hold_up_others(make_pair):
    pair = await make_pair(sender_config=SenderConfig(handshake_timeout_s=50.0))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        mute = asyncio.ensure_future(pair.offer(peer=PeerAddress(f"tcp://127.0.0.1:{port}", "x", "y")))

        transfer = await pair.offer("t2")
        await transfer.send_blocks(pair.blocks())
        await transfer.finish(b"")

        assert not mute.done()
        mute.cancel()
        await asyncio.wait({mute})


async def test_a_peer_that_accepts_and_stays_silent_is_lost_in_time(make_pair):
    pair = await make_pair(sender_config=SenderConfig(handshake_timeout_s=1.0))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        async with asyncio.timeout(30):
            with pytest.raises(PeerLost, match="it listens, and is stopped"):
                await pair.offer(peer=PeerAddress(f"tcp://127.0.0.1:{port}", "x", "y"))


async def test_more_open_transfers_than_allowed_are_refused_as_overload(make_pair):
    pair = await make_pair(receiver_config=ReceiverConfig(max_open_transfers=2))
    opened = [await pair.offer(f"t{number}") for number in range(3)]
    for transfer in opened[:2]:
        await transfer.granted()

    with pytest.raises(TransferRefused) as caught:
        await opened[2].granted()

    assert (caught.value.code, caught.value.retryable) == ("overloaded", True)


async def test_a_sender_does_not_open_more_than_its_limit(make_pair):
    pair = await make_pair(sender_config=SenderConfig(max_open_transfers=1))
    await pair.offer("t1")

    with pytest.raises(TransferRefused) as caught:
        await pair.offer("t2")
    assert caught.value.code == "overloaded"


async def test_closing_the_sender_ends_its_transfers_on_both_ends(pair):
    """C171."""
    transfer = await pair.offer()
    await transfer.granted()

    await pair.sender.close()

    assert isinstance(await transfer.closed(), TransferAborted)
    await pair.sink.wait_ended("t1")
    assert pair.sink.released == {"t1": "closing"}
    with pytest.raises(TransferAborted):
        await pair.offer("t2")


async def test_closing_the_receiver_ends_transfers_on_both_ends(context, make_pair):
    pair = await make_pair()
    pair.sink.may_land.clear()  # a hanging write does not hold up the close
    stuck = await pair.offer("stuck")
    await stuck.send_blocks(pair.blocks())
    await pair.sink.land_started.wait()
    transfer = await pair.offer("t1")
    await transfer.granted()

    async with asyncio.timeout(30):
        await pair.close()

    assert isinstance(await transfer.closed(), TransferError)
    assert pair.sink.released == {"t1": "closing", "stuck": "closing"}
    assert pair.receiver.counts().open == 0


async def test_a_restarted_sender_supersedes_its_old_connection(make_pair):
    """C170."""
    pair = await make_pair()
    transfer = await pair.offer()
    await transfer.granted()

    async with BlockSender(pair.context, node_id="prefill-0", incarnation="p2", layout=pair.layout) as restarted:
        fresh = await restarted.offer(pair.peer, "t2", pair.hashes(10), 10, 60.0)
        await fresh.send_blocks(pair.blocks())
        await fresh.finish(b"")

        error = await asyncio.wait_for(transfer.closed(), 30)
        assert isinstance(error, PeerLost)
        await pair.sink.wait_ended("t1")
        assert pair.sink.released == {"t1": "peer_lost"}


async def test_leases_are_renewed_while_both_live(make_pair):
    pair = await make_pair(receiver_config=ReceiverConfig(lease_s=1.0), sender_config=SenderConfig(lease_s=30.0))
    pair.sink.may_reserve.clear()
    transfer = await pair.offer()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(transfer.closed(), 3.5)

    pair.sink.may_reserve.set()
    await transfer.send_blocks(pair.blocks())
    await transfer.finish(b"")


async def test_a_process_that_stalls_longer_than_the_lease_does_not_lose_its_peer(make_pair):
    pair = await make_pair(receiver_config=ReceiverConfig(lease_s=1.0))
    transfer = await pair.offer()
    await transfer.granted()

    for _ in range(2):
        time.sleep(1.7)  # noqa: ASYNC251 - the whole event loop stands still, as under a long call into native code
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(transfer.closed(), 0.2)

    await transfer.send_blocks(pair.blocks())
    await transfer.finish(b"")


async def test_a_transfer_that_its_owner_leaves_is_aborted(pair):
    with pytest.raises(KeyError):
        async with await pair.offer() as transfer:
            await transfer.granted()
            raise KeyError("the owner fails")

    await _settled(pair)
    assert pair.sink.released == {"t1": "abandoned"}


async def test_a_finished_transfer_is_left_in_peace(pair):
    async with await pair.offer() as transfer:
        await transfer.send_blocks(pair.blocks())
        await transfer.finish(b"")

    assert await transfer.closed() is None
    assert pair.sender.counts().failures == {}


@pytest.mark.parametrize("needed", [[7], [0, 0], ["x"], [None]])
async def test_a_sink_that_asks_for_nonsense_is_released(pair, needed):
    async def reserve(transfer_id, block_hashes, num_tokens):
        pair.sink.landed[transfer_id] = {}
        return needed

    pair.sink.reserve = reserve
    transfer = await pair.offer()

    with pytest.raises(TransferRefused) as caught:
        await transfer.granted()
    assert caught.value.code == "reserve_failed"
    await _settled(pair)
    assert pair.sink.released == {"t1": "reserve_failed"}


async def _connected(pair):
    """Have the connection made, which a deadline of what follows need not allow for."""
    await pair.sender.probe(pair.peer, 1, 60.0)


async def _reach(pair, stage):
    if stage == "reserving":
        pair.sink.may_reserve.clear()
        transfer = await pair.offer()
        await asyncio.wait_for(pair.sink.reserve_started.wait(), 30)
        return transfer
    transfer = await pair.offer()
    await transfer.granted()
    if stage == "landing":
        pair.sink.may_land.clear()
        await transfer.send_blocks(pair.blocks())
        await asyncio.wait_for(pair.sink.land_started.wait(), 30)
    if stage == "finishing":
        pair.sink.may_commit.clear()
        await transfer.send_blocks(pair.blocks())
        finishing = asyncio.ensure_future(transfer.finish(b""))
        finishing.add_done_callback(lambda task: task.exception())
        await asyncio.wait_for(pair.sink.commit_started.wait(), 30)
    return transfer


def _open_gates(pair):
    if pair.sink.reserved:
        pair.sink.may_reserve.set()
    pair.sink.may_land.set()
    pair.sink.may_commit.set()


async def _settled(pair):
    async with asyncio.timeout(30):
        await pair.receiver.idle()


async def test_blocks_that_lie_together_leave_in_few_frames(make_pair, layout):
    size = layout.block_size_bytes
    pair = await make_pair(sender_config=SenderConfig(max_message_bytes=4 * size))
    pair.sink.present = {pair.hashes(40)[6]}  # in the middle of a run
    memory = memoryview(b"".join(block for _, block in pair.blocks(40)))
    transfer = await pair.offer(num_tokens=40)

    await transfer.send_blocks([(0, memory[: 9 * size]), (9, memory[9 * size :])])
    await transfer.finish(b"")

    needed = {index: block for index, block in pair.blocks(40) if index != 6}
    assert pair.sink.landed["t1"] == needed
    assert pair.sink.num_landings <= 3  # [0, 4), [4, 6) with [7, 9), [9, 10), or what came together of them
    assert pair.sender.counts().blocks_skipped == 1
    assert pair.sender.counts().bytes_sent == pair.receiver.counts().bytes_received == 9 * size


async def test_what_comes_while_others_land_is_landed_together(make_pair, layout):
    pair = await make_pair(sender_config=SenderConfig(max_message_bytes=layout.block_size_bytes))
    pair.sink.may_land.clear()
    transfer = await pair.offer(num_tokens=40)

    await transfer.send_blocks(pair.blocks(40)[:1])
    await asyncio.wait_for(pair.sink.land_started.wait(), 30)
    await transfer.send_blocks(pair.blocks(40)[1:])
    finishing = asyncio.ensure_future(transfer.finish(b""))
    incoming = pair.receiver._transfers["t1", 0]
    async with asyncio.timeout(30):
        while len(incoming._inbox) < 10:  # noqa: ASYNC110 - no event says what is queued: nine messages, and DONE
            await asyncio.sleep(0.01)
    pair.sink.may_land.set()
    await finishing

    assert pair.sink.landed["t1"] == dict(pair.blocks(40))
    assert pair.sink.num_landings == 2


async def test_a_run_leaves_as_far_as_there_is_credit(make_pair, layout):
    pair = await make_pair(receiver_config=ReceiverConfig(credit_bytes=3 * layout.block_size_bytes))
    transfer = await pair.offer(num_tokens=40)

    await transfer.send_blocks([(0, b"".join(block for _, block in pair.blocks(40)))])
    await transfer.finish(b"")

    assert pair.sink.landed["t1"] == dict(pair.blocks(40))


async def test_a_run_of_more_than_a_frame_may_hold_leaves_in_several(make_pair):
    layout = KVLayout("m", num_layers=1, block_size=64, num_kv_heads=16, head_dim=128, dtype="float32")  # 1 MiB blocks
    config = SenderConfig(max_message_bytes=16 * layout.block_size_bytes, shared_memory="never")
    pair = await make_pair(layout=layout, sender_config=config)
    transfer = await pair.offer(num_tokens=9 * 64)

    await transfer.send_blocks([(0, b"".join(block for _, block in pair.blocks(9 * 64)))])
    await transfer.finish(b"")

    assert pair.sink.landed["t1"] == dict(pair.blocks(9 * 64))
    assert pair.sender.counts().bytes_shared == 0


async def test_layers_travel_as_they_become_final_and_blocks_bring_the_rest(pair):
    transfer = await pair.offer(num_tokens=16)
    pair.sink.present.add(pair.hashes(16)[0])
    await transfer.granted()
    blocks = pair.blocks(16)

    await transfer.send_layers(blocks[:3], 1)
    await transfer.send_layers(blocks[:3], 1)  # nothing new
    await transfer.send_layers(blocks[2:3], 2)
    assert pair.sender.counts().bytes_sent == 3 * pair.layout.block_size_bytes // 2
    await transfer.send_blocks(blocks[:2])
    await transfer.send_blocks([(2, b"".join(payload for _, payload in blocks[2:]))])
    await transfer.finish(b"")

    assert pair.sink.landed["t1"] == dict(blocks[1:])
    sent, received = pair.sender.counts(), pair.receiver.counts()
    assert sent.bytes_sent == received.bytes_received == 3 * pair.layout.block_size_bytes
    assert sent.blocks_sent == received.blocks_received == 3


async def test_a_block_of_which_layers_are_missing_is_not_whole(pair):
    transfer = await pair.offer()
    await transfer.send_layers(pair.blocks(), 1)
    with pytest.raises(InvalidTransition):
        await transfer.finish(b"")
    await transfer.abort("cancelled", "enough")
    await pair.sink.wait_ended("t1")
    assert pair.sink.released == {"t1": "cancelled"}


@pytest.mark.parametrize("shared_memory", ["always", "never"])
async def test_layers_under_little_credit_come_in_order(make_pair, layout, shared_memory):
    pair = await make_pair(
        receiver_config=ReceiverConfig(credit_bytes=1),
        sender_config=SenderConfig(shared_memory=shared_memory, ring_bytes=2 * layout.block_size_bytes),
    )
    transfer = await pair.offer(num_tokens=40)
    for num_layers in (1, 2):
        await transfer.send_layers(pair.blocks(40), num_layers)
    await transfer.send_blocks(pair.blocks(40))
    await transfer.finish(b"")

    assert pair.sink.landed["t1"] == dict(pair.blocks(40))


async def test_a_peer_that_never_reads_does_not_hold_up_the_exit(layout):
    """C171."""
    server = socket.create_server(("127.0.0.1", 0))  # the kernel connects, and that is all
    peer = PeerAddress(f"tcp://127.0.0.1:{server.getsockname()[1]}", "d", "1")
    context = zmq.asyncio.Context()
    async with BlockSender(context, node_id="p", incarnation="1", layout=layout) as sender:
        with pytest.raises(TransferTimeout):
            await sender.offer(peer, "t", [b"h" * 32], 1, 0.2)
        start = asyncio.get_running_loop().time()

    await asyncio.wait_for(asyncio.to_thread(context.term), 20)

    assert asyncio.get_running_loop().time() - start < 20  # an unlimited linger would wait for ever
    server.close()
