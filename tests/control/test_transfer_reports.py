import socket
from collections.abc import Sequence
from dataclasses import replace

import pytest
import zmq.asyncio

from pdserve.control.codec import MAX_CAUSES, MAX_PEERS
from pdserve.control.messages import OTHER_PEERS, LinkReport, ProbeLink
from pdserve.control.transfer_reports import MAX_PEERS_REPORTED, measure_link, peer_reports
from pdserve.kvtransfer import (
    BlockReceiver,
    BlockSender,
    CurveKeys,
    FailureCode,
    KVLayout,
    ReceiverConfig,
    SenderConfig,
    generate_keys,
)
from pdserve.kvtransfer.counters import PeerBook, PeerCounts, TransferCounts


class BookEnd:
    """An end of the plane with a book of its own."""

    def __init__(self) -> None:
        self.book = PeerBook(clock=lambda: 0.0)

    def peers(self) -> tuple[PeerCounts, ...]:
        return self.book.peers()

    def others(self) -> TransferCounts:
        return self.book.others()


def test_each_peer_has_a_row_and_leases_are_apart_from_failures() -> None:
    end = BookEnd()
    counters = end.book.of("d1")
    counters.sent(3, 300, 0.0)
    counters.failures.update({"lease_expired": 2, FailureCode.WRONG_CHECKSUM: 1})
    counters.offer_to_grant.observe(0.02)
    counters.blocks_compressed, counters.bytes_shared, counters.shared_memory_failures = 4, 5, 6

    (row,) = peer_reports(end)

    assert (row.peer, row.blocks_sent, row.bytes_sent) == ("d1", 3, 300)
    assert row.bytes_per_s == 30.0
    assert (row.blocks_compressed, row.bytes_shared, row.shared_memory_failures) == (4, 5, 6)
    assert row.lease_expiries == 2 and row.failures == (("wrong_checksum", 1),)
    assert sum(row.offer_to_grant.buckets) == 1 and row.offer_to_grant.sum_s == 0.02


def test_strangers_and_peers_beyond_the_bound_share_a_row() -> None:
    end = BookEnd()
    end.book.strangers.failures["unauthenticated"] = 5
    for number in range(MAX_PEERS_REPORTED + 3):
        end.book.of(f"p{number}").sent(1, 10, 0.0)

    rows = peer_reports(end)

    assert len(rows) == MAX_PEERS_REPORTED + 1 <= MAX_PEERS
    assert rows[-1].peer == OTHER_PEERS
    assert rows[-1].blocks_sent == 3 and rows[-1].failures == (("unauthenticated", 5),)
    assert sum(row.bytes_sent for row in rows) == 10 * (MAX_PEERS_REPORTED + 3)


def test_every_cause_fits_into_a_report() -> None:
    assert len(FailureCode) + 2 <= MAX_CAUSES


LAYOUT = KVLayout("m", 1, 2, 1, 2, "float16")


class Nowhere:
    """A sink that wants nothing: probes never reach it."""

    async def reserve(self, transfer_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> Sequence[int]:
        raise AssertionError(transfer_id)

    async def land(self, transfer_id: str, blocks: Sequence[tuple[int, memoryview]], start: int) -> None:
        raise AssertionError(transfer_id)

    async def commit(self, transfer_id: str, metadata: bytes) -> None:
        raise AssertionError(transfer_id)

    async def release(self, transfer_id: str, code: str, message: str) -> None:
        raise AssertionError(transfer_id)


async def _measure(layout: KVLayout, incarnation: str = "d1", size_bytes: int = 1000) -> LinkReport:
    with zmq.asyncio.Context() as context:
        async with (
            BlockReceiver.bind(context, node_id="d", incarnation="d1", layout=LAYOUT, sink=Nowhere()) as receiver,
            BlockSender(context, node_id="p", incarnation="p1", layout=layout) as sender,
        ):
            probe = ProbeLink("x", receiver.endpoint, "d", incarnation, size_bytes, 30.0)
            return await measure_link(sender, probe)


async def test_a_sound_link_is_reported_with_its_figures() -> None:
    report = await _measure(LAYOUT)

    assert (report.probe_id, report.code, report.field, report.is_encrypted) == ("x", None, None, False)
    assert report.connect_s and report.round_trip_s and report.bytes_per_s


@pytest.mark.parametrize("field", ["model_digest", "tokenizer_digest", "model_revision"])
async def test_what_differs_between_the_ends_is_named(field: str) -> None:
    theirs, ours = (replace(LAYOUT, **{field: value}) for value in ("a", "b"))
    with zmq.asyncio.Context() as context:
        async with (
            BlockReceiver.bind(context, node_id="d", incarnation="d1", layout=theirs, sink=Nowhere()) as receiver,
            BlockSender(context, node_id="p", incarnation="p1", layout=ours) as sender,
        ):
            report = await measure_link(sender, ProbeLink("x", receiver.endpoint, "d", "d1", 1000, 30.0))

    assert (report.code, report.field) == ("layout_mismatch", field)
    assert field in report.message


_OURS, _OTHERS = generate_keys(), generate_keys()


@pytest.mark.parametrize(("theirs", "ours"), [(_OTHERS, _OURS), (None, _OURS), (_OTHERS, None)])
async def test_keys_that_differ_or_are_at_one_end_only_are_named(
    theirs: CurveKeys | None, ours: CurveKeys | None
) -> None:
    receiver, sender = ReceiverConfig(curve=theirs), SenderConfig(curve=ours, handshake_timeout_s=30.0)
    with zmq.asyncio.Context() as context:
        async with (
            BlockReceiver.bind(
                context, node_id="d", incarnation="d1", layout=LAYOUT, sink=Nowhere(), config=receiver
            ) as end,
            BlockSender(context, node_id="p", incarnation="p1", layout=LAYOUT, config=sender) as from_here,
        ):
            report = await measure_link(from_here, ProbeLink("x", end.endpoint, "d", "d1", 1000, 30.0))

    assert report.field == "key" and "perhaps the keys of both ends differ" in report.message


async def test_a_port_where_nobody_listens_differs_in_nothing() -> None:
    with zmq.asyncio.Context() as context, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        probe = ProbeLink("x", f"tcp://127.0.0.1:{closed.getsockname()[1]}", "d", "d1", 1000, 30.0)
        async with BlockSender(context, node_id="p", incarnation="p1", layout=LAYOUT) as sender:
            report = await measure_link(sender, probe)

    assert (report.code, report.field) == ("peer_lost", None)


async def test_another_start_of_the_node_is_named_too() -> None:
    report = await _measure(LAYOUT, incarnation="d0")

    assert (report.code, report.field, report.bytes_per_s) == ("wrong_node", "incarnation", None)
