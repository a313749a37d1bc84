import asyncio
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvtransfer import (
    LATENCY_BOUNDS_S,
    BlockReceiver,
    BlockSender,
    PeerAddress,
    PeerLost,
    SenderConfig,
    TransferRefused,
)
from pdserve.kvtransfer.counters import PeerBook
from pdserve.kvtransfer.latency import LatencyHistogram


@given(st.lists(st.floats(0, 1_000)))
def test_every_duration_falls_into_the_one_bucket_that_holds_it(durations):
    histogram = LatencyHistogram()
    for duration in durations:
        histogram.observe(duration)

    counts = histogram.snapshot()

    assert counts.num_observed == len(durations)
    assert counts.sum_s == pytest.approx(sum(durations))
    for place, bound in enumerate(LATENCY_BOUNDS_S):
        assert sum(counts.buckets[: place + 1]) == sum(duration <= bound for duration in durations)


def test_peers_of_long_ago_are_forgotten_but_what_they_moved_is_not():
    book = PeerBook(max_peers=3)
    busy = book.of("busy")
    busy.open = 1
    for number in range(10):
        counters = book.of(f"node-{number}")
        counters.bytes_sent += 100
        counters.failures["peer_lost"] += 1
        counters.tail.observe(0.2)

    assert [peer.node_id for peer in book.peers()] == ["busy", "node-8", "node-9"]
    total = book.total()
    assert (total.bytes_sent, total.failures, total.tail.num_observed, total.open) == (1_000, {"peer_lost": 10}, 10, 1)
    assert book.of("busy") is busy and book.num_open() == 1


async def test_each_peer_is_counted_by_itself_on_both_ends(pair, make_sink, refusal):
    sink = make_sink()
    sink.refusal = refusal
    async with BlockReceiver.bind(
        pair.context, node_id="decode-1", incarnation="d1", layout=pair.layout, sink=sink
    ) as full:
        transfer = await pair.offer()
        await transfer.send_blocks(pair.blocks())
        await transfer.finish(b"")
        refused = await pair.offer("t2", peer=PeerAddress(full.endpoint, "decode-1", "d1"))
        with pytest.raises(TransferRefused):
            await refused.granted()
        await full.idle()

        sent = {peer.node_id: peer.counts for peer in pair.sender.peers()}
        received = {peer.node_id: peer.counts for peer in (*pair.receiver.peers(), *full.peers())}

    assert sent["decode-0"].blocks_sent == 3 and sent["decode-1"].blocks_sent == 0
    assert (sent["decode-1"].blocks_refused, sent["decode-1"].failures) == (3, {"refused": 1})
    assert sent["decode-0"].failures == {}
    assert received["prefill-0"].blocks_refused == 3
    for counts in (sent["decode-0"], pair.receiver.counts()):
        for latency in (counts.offer_to_grant, counts.first_block, counts.tail):
            assert latency.num_observed == 1 and latency.sum_s > 0


async def test_a_receiver_that_stops_answering_is_told_apart_from_one_that_closes(pair, process):
    for number, code, lease_s in ((signal.SIGSTOP, "lease_expired", 1.0), (signal.SIGKILL, "peer_lost", 60.0)):
        async with process(pair.layout, incarnation="d1", lease_s=60.0) as (child, words):
            peer = PeerAddress(words["endpoint"], "decode-0", "d1")
            config = SenderConfig(lease_s=lease_s, handshake_timeout_s=30.0)
            names = {"node_id": "prefill-0", "incarnation": "p1", "layout": pair.layout}
            async with BlockSender(pair.context, **names, config=config) as sender:
                transfer = await sender.offer(peer, "t", pair.hashes(10), 10, 60.0)
                await transfer.granted()

                child.send_signal(number)

                error = await asyncio.wait_for(transfer.closed(), 30)
                assert isinstance(error, PeerLost) and error.code == code
                assert sender.counts().failures == {code: 1}
