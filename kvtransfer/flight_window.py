"""How many bytes a sender lets be under way to one receiver, within its credit. Pure; times come in as arguments.

Few, because memory that was used a moment ago is still in the processor's cache and is copied at several times the
speed; as many as it takes that neither a long way nor a receiver that takes blocks in fits (a decode node lands them
between two steps) leaves the link idle.
"""

PAUSE_S = 0.01  # longer than a message takes where the speed of memory matters, shorter than a step of a model
LEAST_BYTES = 8 * 1024 * 1024
_CALM_WINDOWS = 16


class FlightWindow:
    """Doubles when more could be sent and nothing has come back for `PAUSE_S`; shrinks by a quarter when as much as
    many windows has come back without such a pause. Invariant: least <= size_bytes <= most."""

    def __init__(self, least_bytes: int, most_bytes: int) -> None:
        self._least_bytes = min(least_bytes, most_bytes)
        self._most_bytes = most_bytes
        self.size_bytes = self._least_bytes
        self._calm_bytes = 0
        self._moved_at = 0.0

    def sent(self, now: float) -> None:
        """Take note that something left."""
        self._moved_at = now

    def returned(self, num_bytes: int, is_awaited: bool, now: float) -> None:
        """Take note of credit that came back; `is_awaited`: somebody waits for it."""
        paused_s, self._moved_at = now - self._moved_at, now
        self._calm_bytes += num_bytes
        if is_awaited and paused_s > PAUSE_S:
            self.size_bytes = min(2 * self.size_bytes, self._most_bytes)
            self._calm_bytes = 0
        elif self._calm_bytes > _CALM_WINDOWS * self.size_bytes:
            self.size_bytes = max(self.size_bytes * 3 // 4, self._least_bytes)
            self._calm_bytes = 0
