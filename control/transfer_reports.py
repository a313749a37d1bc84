"""Between the KV plane's words and the control plane's: counters of peers to reports, a measured link to its report."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

from pdserve.control.messages import OTHER_PEERS, DurationCounts, LinkReport, PeerCounts, ProbeLink
from pdserve.kvtransfer.counters import PeerCounts as MovedByPeer
from pdserve.kvtransfer.counters import TransferCounts
from pdserve.kvtransfer.errors import FailureCode, LayoutMismatch, PeerLost, TransferError
from pdserve.kvtransfer.latency import LatencyCounts
from pdserve.kvtransfer.peer_address import PeerAddress
from pdserve.kvtransfer.probe import MAX_PROBE_TOTAL_BYTES
from pdserve.kvtransfer.sender import BlockSender

MAX_PEERS_REPORTED = 64
_NOTHING = TransferCounts(0, 0, 0, 0, 0, 0, 0, {})
_FIELDS: Mapping[str, str] = {
    FailureCode.WRONG_NODE: "incarnation",
    FailureCode.UNSUPPORTED_VERSION: "protocol_version",
    FailureCode.UNAUTHENTICATED: "key",
}


class CountingEnd(Protocol):
    """What both ends of the KV plane have in common here."""

    def peers(self) -> tuple[MovedByPeer, ...]:
        """Return what was moved, for each peer; the one used last comes last."""

    def others(self) -> TransferCounts:
        """Return what none of them did."""


def peer_reports(end: CountingEnd) -> tuple[PeerCounts, ...]:
    """Return the counters of the peers used last, and one row for all others together."""
    peers = end.peers()
    others = end.others()
    for each in peers[:-MAX_PEERS_REPORTED]:
        others += each.counts
    rows = [*peers[-MAX_PEERS_REPORTED:], MovedByPeer(OTHER_PEERS, others)]
    return tuple(_report(row) for row in rows if row.node_id != OTHER_PEERS or _has_counted(row.counts))


async def measure_link(sender: BlockSender, probe: ProbeLink) -> LinkReport:
    """Do what a probe asks for; what is wrong is in the report."""
    try:
        peer = PeerAddress(probe.decode_endpoint, probe.decode_node_id, probe.decode_incarnation)
        found = await sender.probe(peer, min(probe.size_bytes, MAX_PROBE_TOTAL_BYTES), probe.timeout_s)
    except TransferError as error:
        field = error.field if isinstance(error, LayoutMismatch | PeerLost) else _FIELDS.get(error.code)
        return LinkReport(probe.probe_id, error.code, error.message, field)
    except ValueError as error:
        return LinkReport(probe.probe_id, FailureCode.PROTOCOL, str(error), None)
    return LinkReport(
        probe.probe_id,
        None,
        "",
        None,
        found.connect_s,
        found.round_trip_s,
        found.bytes_per_s,
        found.is_encrypted,
        found.shares_memory,
    )


def _has_counted(counts: TransferCounts) -> bool:
    return counts != _NOTHING


def _report(row: MovedByPeer) -> PeerCounts:
    counts = row.counts
    failures = Counter(counts.failures)
    lease_expiries = failures.pop(FailureCode.LEASE_EXPIRED, 0)
    return PeerCounts(
        peer=row.node_id,
        bytes_sent=counts.bytes_sent,
        bytes_received=counts.bytes_received,
        bytes_per_s=counts.bytes_per_s,
        blocks_sent=counts.blocks_sent,
        blocks_received=counts.blocks_received,
        blocks_skipped=counts.blocks_skipped,
        blocks_refused=counts.blocks_refused,
        blocks_converted=counts.blocks_converted,
        blocks_compressed=counts.blocks_compressed,
        bytes_shared=counts.bytes_shared,
        shared_memory_failures=counts.shared_memory_failures,
        open=counts.open,
        completed=counts.completed,
        lease_expiries=lease_expiries,
        failures=tuple(sorted(_named(failures.items()))),
        offer_to_grant=_durations(counts.offer_to_grant),
        first_block=_durations(counts.first_block),
        tail=_durations(counts.tail),
    )


def _named(failures: Iterable[tuple[str, int]]) -> Iterable[tuple[str, int]]:
    """Codes as texts, for the wire."""
    return ((str(cause), number) for cause, number in failures)


def _durations(latency: LatencyCounts) -> DurationCounts:
    return DurationCounts(latency.buckets, latency.sum_s)
