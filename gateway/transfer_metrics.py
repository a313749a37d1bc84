"""The metrics of the KV plane and of what nodes could not read or would not hear, as they last said them; they start
again with a node."""

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pdserve.control.messages import LATENCY_BOUNDS_S, DurationCounts, NodeLoad, PeerCounts

_LINK = ("node_id", "peer")
_BOUNDS = (*map(str, LATENCY_BOUNDS_S), "+Inf")
_FATES = ("sent", "received", "skipped", "refused", "converted", "compressed")
_STAGES = {
    "offer_to_grant": "From the offer of a prompt's blocks to its grant",
    "first_block": "From the grant to the first block, sent or arrived",
    "tail": "From the last block to the acknowledgement of all",
}


def transfer_page(loads: Mapping[str, NodeLoad], malformed: Mapping[str, int], retries: Mapping[str, int]) -> bytes:
    """Return the metrics of all nodes, by node id, in Prometheus' text format.

    `malformed` counts the messages of each node that this gateway could not read, `retries` its own new attempts by
    cause.
    """
    registry = CollectorRegistry()
    registry.register(_Loads(loads, malformed, retries))
    return generate_latest(registry)


class _Loads(Collector):
    def __init__(self, loads: Mapping[str, NodeLoad], malformed: Mapping[str, int], retries: Mapping[str, int]) -> None:
        self._loads = loads
        self._malformed = malformed
        self._retries = retries

    def collect(self) -> Iterator[Metric]:
        links = [(node_id, row) for node_id, load in self._loads.items() for row in load.peers]
        yield from _traffic(links)
        yield from _ends(links)
        yield from (_histogram(stage, text, links) for stage, text in _STAGES.items())
        unread = CounterMetricFamily(
            "pdserve_malformed_messages", "Control messages that could not be read", labels=("node_id", "reader")
        )
        refused = CounterMetricFamily(
            "pdserve_refused_connections", "Peers without a trusted key on the control plane", labels=("node_id",)
        )
        for node_id, load in self._loads.items():
            unread.add_metric((node_id, "node"), load.malformed)
            refused.add_metric((node_id,), load.refused_connections)
        for node_id, number in self._malformed.items():
            unread.add_metric((node_id, "gateway"), number)
        retries = CounterMetricFamily("pdserve_retries", "Attempts that were made again, by cause", labels=("cause",))
        for cause, number in self._retries.items():
            retries.add_metric((cause,), number)
        yield from (unread, refused, retries)


def _traffic(links: list[tuple[str, PeerCounts]]) -> Iterator[Metric]:
    moved = CounterMetricFamily("pdserve_transfer_bytes", "Bytes of KV blocks moved", labels=(*_LINK, "direction"))
    rate = GaugeMetricFamily("pdserve_transfer_bytes_per_second", "Rate of the last seconds, both ways", labels=_LINK)
    blocks = CounterMetricFamily("pdserve_transfer_blocks", "KV blocks by what became of them", labels=(*_LINK, "fate"))
    shared = CounterMetricFamily(
        "pdserve_transfer_shared_memory_bytes", "Of the bytes moved, those through shared memory", labels=_LINK
    )
    unshared = CounterMetricFamily(
        "pdserve_transfer_shared_memory_failures", "Peers that offered shared memory in vain", labels=_LINK
    )
    for node_id, row in links:
        labels = (node_id, row.peer)
        moved.add_metric((*labels, "sent"), row.bytes_sent)
        moved.add_metric((*labels, "received"), row.bytes_received)
        rate.add_metric(labels, row.bytes_per_s)
        for fate in _FATES:
            blocks.add_metric((*labels, fate), getattr(row, f"blocks_{fate}"))
        shared.add_metric(labels, row.bytes_shared)
        unshared.add_metric(labels, row.shared_memory_failures)
    yield from (moved, rate, blocks, shared, unshared)


def _ends(links: list[tuple[str, PeerCounts]]) -> Iterator[Metric]:
    is_open = GaugeMetricFamily("pdserve_transfers_open", "Transfers not at an end", labels=_LINK)
    completed = CounterMetricFamily("pdserve_transfers_completed", "Transfers taken over", labels=_LINK)
    failures = CounterMetricFamily(
        "pdserve_transfer_failures", "Transfers and connections that failed, by cause", labels=(*_LINK, "cause")
    )
    leases = CounterMetricFamily("pdserve_lease_expiries", "Transfers of peers that did not answer", labels=_LINK)
    for node_id, row in links:
        labels = (node_id, row.peer)
        is_open.add_metric(labels, row.open)
        completed.add_metric(labels, row.completed)
        leases.add_metric(labels, row.lease_expiries)
        for cause, number in row.failures:
            failures.add_metric((*labels, cause), number)
    yield from (is_open, completed, failures, leases)


def _histogram(stage: str, text: str, links: list[tuple[str, PeerCounts]]) -> Metric:
    family = HistogramMetricFamily(f"pdserve_transfer_{stage}_seconds", text, labels=_LINK)
    for node_id, row in links:
        durations: DurationCounts = getattr(row, stage)
        if len(durations.buckets) == len(_BOUNDS):  # a node of another version has other bounds
            buckets = list(zip(_BOUNDS, accumulate(durations.buckets), strict=True))
            family.add_metric((node_id, row.peer), buckets=buckets, sum_value=durations.sum_s)
    return family
