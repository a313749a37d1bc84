"""One deadline that is moved far more often than it passes, such as the next token of a stream."""

import asyncio
from collections.abc import Callable


class MovingDeadline:
    """Calls `passed` once a set moment has passed. Moving it later costs an assignment, not a timer.

    An `asyncio.timeout` around each token is a timer made and cancelled for each token, which is most of what a token
    costs. Here one timer stays: when it fires early it is set again to the moment that counts by then.
    """

    def __init__(self, passed: Callable[[], None]) -> None:
        self._passed = passed
        self._loop: asyncio.AbstractEventLoop | None = None  # kept, as asking for it is a call of the system
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = 0.0

    def set(self, timeout_s: float) -> None:
        """Let it pass `timeout_s` from now, unless it is set again or cleared before."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        due = self._due = loop.time() + timeout_s
        if self._timer is not None and self._fires_at > due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._start(loop, due)

    def clear(self) -> None:
        """Let nothing pass; the timer stays for the next `set`."""
        self._due = None

    def close(self) -> None:
        """Give the timer up."""
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        if self._due is None or self._loop is None:
            return
        if self._loop.time() < self._due:
            self._start(self._loop, self._due)
            return
        self._due = None
        self._passed()

    def _start(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._timer = loop.call_at(due, self._fire)
        self._fires_at = due
