"""The dispatch half as operators see it."""

from collections.abc import Mapping

from pdserve.control.messages import BlockCounts, NodeLoad, NodeRole, SpeculationCounts, TierCounts, TransferCounts
from pdserve.control.request_state import RequestStatus
from pdserve.gateway.canary import Canary
from pdserve.gateway.dispatcher import Dispatcher
from pdserve.gateway.node_pool import NodePool
from pdserve.gateway.node_view import NodeView
from pdserve.gateway.transfer_status import peer_status

_RUNNING = (RequestStatus.PREFILLING, RequestStatus.TRANSFERRING, RequestStatus.DECODING)
_NO_TRANSFERS = TransferCounts(bytes_sent=0, bytes_received=0, blocks_sent=0, blocks_skipped=0, open=0)


class DispatchStatus:
    """A `ServiceStatus` over the node pool, the dispatcher and the canary. Owns nothing."""

    def __init__(self, pool: NodePool, dispatcher: Dispatcher, canary: Canary) -> None:
        self._pool = pool
        self._dispatcher = dispatcher
        self._canary = canary

    def not_ready_reason(self) -> str | None:
        """Return why no token can be produced now; None when one can."""
        if self._canary.ready:
            return None
        if not self._pool.redis.is_ok:
            return "Redis does not answer"
        if not any(view.is_ready and view.is_decode for view in self._pool.views()):
            num_refusing = self._pool.num_refusing()
            refusals = f"; {num_refusing} registered nodes refuse this gateway's key" if num_refusing else ""
            return f"no decode node is ready{refusals}"
        if (missing := self._canary.missing_nodes()) is not None:
            return missing
        return "no token has passed the whole path yet"

    def request_counts(self) -> tuple[int, int]:
        """Return how many admitted requests are running, and how many are waiting for a node."""
        requests = self._dispatcher.snapshot().requests
        num_running = sum(requests[status] for status in _RUNNING)
        return num_running, requests[RequestStatus.QUEUED]

    def context_limit(self) -> int | None:
        """Return how many tokens the nodes can hold for one request; None without a decode node."""
        ready = self._pool.ready_nodes()
        capacities = [node.num_blocks * node.block_size for node in ready if node.role is NodeRole.DECODE]
        if not capacities:
            return None
        return min(max(capacities), min(node.max_model_len for node in ready))

    def speculation(self) -> Mapping[str, SpeculationCounts]:
        """Return what each node that speculates has drafted, by node id."""
        loads = {view.info.node_id: view.load for view in self._pool.views()}
        return {node_id: load.speculation for node_id, load in loads.items() if load and load.speculation}

    def loads(self) -> Mapping[str, NodeLoad]:
        """Return what each node last said of its load, by node id."""
        return {view.info.node_id: view.load for view in self._pool.views() if view.load is not None}

    def malformed(self) -> Mapping[str, int]:
        """Return how many messages of each node could not be read here, by node id."""
        return {view.info.node_id: view.num_malformed for view in self._pool.views()}

    def retries(self) -> Mapping[str, int]:
        """Return how many attempts were made again, by cause."""
        return self._dispatcher.snapshot().retries

    def report(self) -> dict[str, object]:
        """Return the redis, requests, routes and nodes parts of /admin/status."""
        counts = self._dispatcher.snapshot()
        redis = self._pool.redis
        return {
            "redis": {"ok": redis.is_ok, "latency_ms": redis.latency_ms},
            "requests": {status.value: number for status, number in counts.requests.items()},
            "routes": {route.value: number for route, number in counts.routes.items()},
            "nodes": [_node(view) for view in self._pool.views()],
            "attempts": counts.num_attempts,
            "retries": dict(counts.retries),
            "record_changes_dropped": counts.num_record_changes_dropped,
        }


def _node(view: NodeView) -> dict[str, object]:
    load = view.load
    blocks = load.blocks if load else BlockCounts(view.info.num_blocks, 0, 0, 0, 0)
    transfer = load.transfer if load else _NO_TRANSFERS
    return {
        "node_id": view.info.node_id,
        "role": view.info.role.value,
        "incarnation": view.info.incarnation,
        "address": view.info.control_endpoint,
        "ready": view.is_ready,
        "lease_age_s": view.lease_age_s,
        "running": load.running if load else 0,
        "waiting": load.waiting if load else 0,
        "blocks": {
            "total": blocks.total,
            "free": blocks.free,
            "cached": blocks.cached,
            "in_use": blocks.in_use,
            "in_flight": blocks.in_flight,
        },
        "transfer": {
            "bytes_sent": transfer.bytes_sent,
            "bytes_received": transfer.bytes_received,
            "blocks_sent": transfer.blocks_sent,
            "blocks_skipped": transfer.blocks_skipped,
            "open": transfer.open,
            "peers": [peer_status(peer) for peer in (load.peers if load else ())],
        },
        "malformed_messages": {"read_by_node": load.malformed if load else 0, "read_by_gateway": view.num_malformed},
        "refused_connections": load.refused_connections if load else 0,
        "speculation": _speculation(load.speculation if load else None),
        "kv_tiers": {counts.tier.value: _tier(counts) for counts in (load.tiers if load else ())},
        "preemptions": load.preemptions if load else 0,
        "swaps": load.swaps if load else 0,
        "kv_events": view.info.events_endpoint,
        "kv_events_replay": view.info.events_replay_endpoint,
    }


def _tier(counts: TierCounts) -> dict[str, int]:
    return {
        "blocks": counts.blocks,
        "max_blocks": counts.max_blocks,
        "bytes": counts.bytes,
        "hits": counts.hits,
        "misses": counts.misses,
        "corrupt": counts.corrupt,
    }


def _speculation(counts: SpeculationCounts | None) -> dict[str, object] | None:
    if counts is None:
        return None
    return {
        "method": counts.method,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "acceptance_rate": counts.accepted / counts.drafted if counts.drafted else None,
    }
