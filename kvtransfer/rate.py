"""How fast bytes have moved of late: an average that forgets with time. Pure; times come in as arguments."""

from dataclasses import dataclass
from math import exp

RATE_WINDOW_S = 10.0  # what is older counts for less than 1/e


@dataclass(slots=True)
class RateMeter:
    """Bytes per second, each byte weighted by exp(-age / RATE_WINDOW_S): no history is kept."""

    _weighted_bytes: float = 0.0
    _weighed_at: float = 0.0

    def observe(self, num_bytes: int, now: float) -> None:
        """Count bytes that moved at `now`."""
        self._weighted_bytes = self._weighted_at(now) + num_bytes
        self._weighed_at = max(now, self._weighed_at)

    def per_s(self, now: float) -> float:
        """Return the rate at `now`."""
        return self._weighted_at(now) / RATE_WINDOW_S

    def _weighted_at(self, now: float) -> float:
        return self._weighted_bytes * exp(-max(0.0, now - self._weighed_at) / RATE_WINDOW_S)
