"""Where what nodes say about one attempt is taken by its request, or waits for it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.control.messages import StageReport, TaskFailed, TokenChunk
from pdserve.engine.follower import Follower
from pdserve.gateway.deadline import MovingDeadline
from pdserve.gateway.errors import ProtocolViolation
from pdserve.gateway.node_view import NodeKey


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node that the attempt was on is gone."""

    reason: str


class AttemptEvent(NamedTuple):
    """What was said, and by which node."""

    node: NodeKey
    message: TokenChunk | StageReport | TaskFailed | NodeLost


class AttemptInbox:
    """A bounded queue for one reader. A node that says more than its task can need has broken the protocol; nothing
    blocks.
    """

    def __init__(self, attempt_id: str, nodes: tuple[NodeKey, ...], capacity: int) -> None:
        self.attempt_id = attempt_id
        self.nodes = nodes
        self._capacity = capacity
        self._events: deque[AttemptEvent] = deque()
        self._reader: Follower[AttemptEvent] | None = None
        self._deadline = MovingDeadline(self._time_out)
        self._has_overflowed = False

    def put(self, event: AttemptEvent) -> None:
        """Give `event` to whoever hears, or keep it; room is kept for the loss of each node."""
        if self._reader is not None and self._reader.put(event):
            return
        if len(self._events) >= self._capacity and not isinstance(event.message, NodeLost):
            self._has_overflowed = True
        elif len(self._events) < self._capacity + len(self.nodes):
            self._events.append(event)

    async def hear(self, timeout_s: float, take: Callable[[AttemptEvent], bool]) -> None:
        """Give each event to `take` the moment it comes, until it returns True.

        Raises:
            TimeoutError: it has not within `timeout_s`.
            ProtocolViolation: more was said than fits.
            Exception: whatever `take` raises.
        """
        if self._has_overflowed:
            raise ProtocolViolation(f"more than {self._capacity} messages wait about {self.attempt_id}")
        while self._events:
            if take(self._events.popleft()):
                return
        self._reader = Follower(take)
        self._deadline.set(timeout_s)
        try:
            await self._reader.wait()
        finally:
            self._reader = None
            self._deadline.clear()

    def close(self) -> None:
        """Give the timer up; nobody reads any more."""
        self._deadline.close()

    def _time_out(self) -> None:
        if self._reader is not None:
            self._reader.fail(TimeoutError(f"nothing was said about {self.attempt_id}"))
