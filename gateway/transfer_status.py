"""The KV plane of one node as /admin/status shows it."""

from pdserve.control.messages import DurationCounts, PeerCounts

_SHOWN = (
    "bytes_sent",
    "bytes_received",
    "blocks_sent",
    "blocks_received",
    "blocks_skipped",
    "blocks_refused",
    "blocks_converted",
    "blocks_compressed",
    "bytes_shared",
    "shared_memory_failures",
    "open",
    "completed",
    "lease_expiries",
)


def peer_status(peer: PeerCounts) -> dict[str, object]:
    """Return one row: what was moved to and from a peer, why transfers failed, the mean of each stage."""
    return {
        "peer": peer.peer,
        **{name: getattr(peer, name) for name in _SHOWN},
        "bytes_per_s": round(peer.bytes_per_s),
        "failures": dict(peer.failures),
        "offer_to_grant_mean_s": _mean_s(peer.offer_to_grant),
        "first_block_mean_s": _mean_s(peer.first_block),
        "tail_mean_s": _mean_s(peer.tail),
    }


def _mean_s(durations: DurationCounts) -> float | None:
    number = sum(durations.buckets)
    return durations.sum_s / number if number else None
