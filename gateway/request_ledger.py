"""The counts of requests by status and by route: facts only, each request counted once in each."""

from collections import Counter

from pdserve.control.request_state import RequestStatus, StatusChange
from pdserve.gateway.generation import Route

_SMOOTHING = 0.1
_MAX_CAUSES = 32  # codes are words of the nodes; as labels of metrics they need a bound


class RequestLedger:
    """Owns the counts. Invariant: every request that was opened is in exactly one status."""

    def __init__(self) -> None:
        self.requests = Counter(dict.fromkeys(RequestStatus, 0))
        self.routes = Counter(dict.fromkeys(Route, 0))
        self.retries: Counter[str] = Counter()  # by the cause of the failure before
        self.num_attempts = 0
        self.mean_duration_s: float | None = None

    def open(self) -> None:
        """Count a request as QUEUED."""
        self.requests[RequestStatus.QUEUED] += 1

    def withdraw(self) -> None:
        """Uncount a QUEUED request that was refused after all."""
        self.requests[RequestStatus.QUEUED] -= 1

    def move(self, before: RequestStatus, path: tuple[StatusChange, ...]) -> None:
        """Count a request's way along `path`."""
        self.requests[before] -= 1
        self.requests[path[-1].status] += 1

    def retry(self, cause: str) -> None:
        """Count an attempt that failed and is made again."""
        self.retries[cause if cause in self.retries or len(self.retries) < _MAX_CAUSES else "other"] += 1

    def end(self, route: Route | None, duration_s: float) -> None:
        """Count the route of a request that has ended (None: it had no token), and learn from its duration."""
        if route is not None:
            self.routes[route] += 1
        mean_s = self.mean_duration_s
        self.mean_duration_s = duration_s if mean_s is None else mean_s + _SMOOTHING * (duration_s - mean_s)
