"""Real processes that are killed or stopped in the middle of a transfer."""

import asyncio
import signal

import pytest
import zmq

from pdserve.kvtransfer import PeerAddress, PeerLost, ReceiverConfig, SenderConfig, TransferError
from pdserve.kvtransfer.frames import Grant, Hello, Offer, Welcome, decode, encode


async def test_a_killed_sender_is_released_at_once_and_others_go_on(pair, process):  # C144
    address = [pair.receiver.endpoint, "decode-0", "d1"]
    await pair.sender.offer(pair.peer, "survivor", pair.hashes(10), 10, 30.0)
    async with process(pair.layout, peer=address, num_transfers=20, incarnation="p9") as (child, words):
        assert words == {"granted": 20}
        assert pair.receiver.counts().open >= 20

        child.send_signal(signal.SIGKILL)

        async with asyncio.timeout(30):
            for number in range(20):
                await pair.sink.wait_ended(f"t{number}")
    assert {pair.sink.released[f"t{number}"] for number in range(20)} == {"peer_lost"}  # not lease_expired


async def test_a_sender_that_starts_again_while_the_receiver_is_busy_is_served_at_once(pair, process):  # C170
    """The receiver reads nothing while one dies and its successor, of the same name, connects and offers."""
    address = [pair.receiver.endpoint, "decode-0", "d1"]
    with zmq.Context() as context, context.socket(zmq.DEALER) as successor:
        successor.linger, successor.rcvtimeo = 0, 30_000
        async with process(pair.layout, peer=address, num_transfers=3, incarnation="p1") as (child, _):
            child.send_signal(signal.SIGKILL)
            with successor.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
                successor.connect(pair.receiver.endpoint)
                assert monitor.poll(30_000)  # not awaited: the event loop, and the receiver with it, has no turn
                successor.disable_monitor()
            hello = Hello("prefill-0", "p2", "decode-0", "d1", pair.layout, "auto", 10_000)
            offer = Offer("t9", 1, tuple(pair.hashes(10)), 10, 30_000)
            for message in (hello, offer):
                successor.send(encode(message))

            words = [decode(await asyncio.to_thread(successor.recv)) for _ in range(2)]

            for number in range(3):
                await pair.sink.wait_ended(f"t{number}")
    assert [type(word) for word in words] == [Welcome, Grant]
    assert pair.sink.released == dict.fromkeys(("t0", "t1", "t2"), "peer_lost")


async def test_a_stopped_sender_is_released_within_the_lease(make_pair, process):
    pair = await make_pair(receiver_config=ReceiverConfig(lease_s=1.0))
    address = [pair.receiver.endpoint, "decode-0", "d1"]
    async with process(pair.layout, peer=address, num_transfers=3) as (child, _):
        child.send_signal(signal.SIGSTOP)

        await asyncio.wait_for(pair.receiver.idle(), 30)

    assert pair.sink.released == dict.fromkeys(("t0", "t1", "t2"), "lease_expired")


async def test_a_killed_receiver_is_learned_at_once_and_its_successor_is_served(pair, process):
    async with process(pair.layout, incarnation="d1") as (child, words):
        peer = PeerAddress(words["endpoint"], "decode-0", "d1")
        transfers = [await pair.offer(f"t{number}", peer=peer, deadline_s=60.0) for number in range(4)]
        for transfer in transfers:
            await transfer.granted()
            await transfer.send_blocks(pair.blocks()[:1])

        child.send_signal(signal.SIGKILL)

        async with asyncio.timeout(30):
            for transfer in transfers:
                assert isinstance(await transfer.closed(), PeerLost)
        with pytest.raises(PeerLost):
            await transfers[0].send_blocks(pair.blocks()[1:])
        with pytest.raises(TransferError):
            await pair.offer("t9", peer=peer)
        assert pair.sender.counts().open == 0
        # Each transfer, and the connection that did not come to be again; not lease_expired.
        assert pair.sender.counts().failures == {"peer_lost": 5}
    async with process(pair.layout, incarnation="d2") as (_, words):
        transfer = await pair.offer("t1", peer=PeerAddress(words["endpoint"], "decode-0", "d2"))
        await transfer.send_blocks(pair.blocks())
        await transfer.finish(b"")


async def test_a_stopped_receiver_is_lost_after_the_lease_and_holds_up_nobody(make_pair, process):
    pair = await make_pair(sender_config=SenderConfig(lease_s=1.0))
    async with process(pair.layout, incarnation="d1") as (child, words):
        stopped = await pair.offer("stopped", peer=PeerAddress(words["endpoint"], "decode-0", "d1"))
        await stopped.granted()

        child.send_signal(signal.SIGSTOP)

        other = await pair.offer("other")
        await other.send_blocks(pair.blocks())
        await other.finish(b"")
        assert isinstance(await asyncio.wait_for(stopped.closed(), 30), PeerLost)
