"""Where the time of transfers goes: histograms with fixed bounds, and the marks that fill them."""

from bisect import bisect_left
from dataclasses import dataclass, field

# Seconds; upper bounds, inclusive. What is longer goes into the last bucket, which has no bound.
LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


@dataclass(frozen=True, slots=True)
class LatencyCounts:
    """A snapshot: how many durations fell into each bucket of LATENCY_BOUNDS_S and the one beyond, and their sum."""

    buckets: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS_S) + 1)
    sum_s: float = 0.0

    @property
    def num_observed(self) -> int:
        """How many durations there were."""
        return sum(self.buckets)

    def __add__(self, other: "LatencyCounts") -> "LatencyCounts":
        pairs = zip(self.buckets, other.buckets, strict=True)
        return LatencyCounts(tuple(ours + theirs for ours, theirs in pairs), self.sum_s + other.sum_s)


@dataclass(slots=True)
class LatencyHistogram:
    """The running counts of one kind of duration."""

    _buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    _sum_s: float = 0.0

    def observe(self, duration_s: float) -> None:
        """Count one duration."""
        self._buckets[bisect_left(LATENCY_BOUNDS_S, duration_s)] += 1
        self._sum_s += duration_s

    def snapshot(self) -> LatencyCounts:
        """Return the present values."""
        return LatencyCounts(tuple(self._buckets), self._sum_s)
