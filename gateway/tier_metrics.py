"""The metrics of KV tiers and preemptions, as the nodes last said them; they start again with a node."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pdserve.control.messages import NodeLoad

_TIER = ("node_id", "tier")


def tier_page(loads: Mapping[str, NodeLoad]) -> bytes:
    """Return the metrics of all nodes, by node id, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Loads(loads))
    return generate_latest(registry)


class _Loads(Collector):
    def __init__(self, loads: Mapping[str, NodeLoad]) -> None:
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("pdserve_kv_blocks", "KV blocks cached in a tier", labels=_TIER)
        most = GaugeMetricFamily("pdserve_kv_max_blocks", "KV blocks that a tier can hold", labels=_TIER)
        size = GaugeMetricFamily("pdserve_kv_bytes", "Bytes of KV blocks cached in a tier", labels=_TIER)
        hits = CounterMetricFamily("pdserve_kv_block_hits", "Prompt blocks found in a tier", labels=_TIER)
        misses = CounterMetricFamily("pdserve_kv_block_misses", "Prompt blocks not found down to a tier", labels=_TIER)
        corrupt = CounterMetricFamily(
            "pdserve_kv_corrupt_blocks", "Cached blocks that failed their check", labels=_TIER
        )
        preempted = CounterMetricFamily("vllm:num_preemptions", "Preempted sequences", labels=("node_id",))
        swapped = CounterMetricFamily(
            "pdserve_swaps", "Preemptions that kept blocks in host memory", labels=("node_id",)
        )
        for node_id, load in self._loads.items():
            for counts in load.tiers:
                labels = (node_id, counts.tier.value)
                blocks.add_metric(labels, counts.blocks)
                most.add_metric(labels, counts.max_blocks)
                size.add_metric(labels, counts.bytes)
                hits.add_metric(labels, counts.hits)
                misses.add_metric(labels, counts.misses)
                corrupt.add_metric(labels, counts.corrupt)
            preempted.add_metric((node_id,), load.preemptions)
            swapped.add_metric((node_id,), load.swaps)
        yield from (blocks, most, size, hits, misses, corrupt, preempted, swapped)
