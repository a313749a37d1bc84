"""What both ends of a transfer keep of its course: the state, how it came there, and its deadline.

OFFERED → GRANTED → SENDING → FINISHING → DONE, and from each of them but DONE → ABORTED. The rules of each
end are in `outgoing_session` and `incoming_session`. No I/O and no clock: `now` is an argument, in seconds
of one monotonic clock. Whether the other end lives is its connection's business, not the transfer's.
"""

from collections import deque
from enum import StrEnum

from pdserve.kvtransfer.errors import InvalidTransition

_MAX_STORY_LINES = 64


class TransferState(StrEnum):
    """Where a transfer is."""

    OFFERED = "offered"  # the receiver has not answered yet
    GRANTED = "granted"  # slots are reserved, no block has been sent
    SENDING = "sending"
    FINISHING = "finishing"  # DONE is said, its acknowledgement is not
    DONE = "done"
    ABORTED = "aborted"


TERMINAL_STATES = frozenset({TransferState.DONE, TransferState.ABORTED})

_NEXT_STATES: dict[TransferState, frozenset[TransferState]] = {
    TransferState.OFFERED: frozenset({TransferState.GRANTED, TransferState.ABORTED}),
    TransferState.GRANTED: frozenset({TransferState.SENDING, TransferState.FINISHING, TransferState.ABORTED}),
    TransferState.SENDING: frozenset({TransferState.FINISHING, TransferState.ABORTED}),
    TransferState.FINISHING: frozenset({TransferState.DONE, TransferState.ABORTED}),
    TransferState.DONE: frozenset(),
    TransferState.ABORTED: frozenset(),
}


class TransferCourse:
    """The state of one transfer, its story and its deadline, which is fixed."""

    def __init__(self, transfer_id: str, deadline: float, now: float) -> None:
        self.transfer_id = transfer_id
        self.deadline = deadline
        self._state = TransferState.OFFERED
        self._story: deque[str] = deque(maxlen=_MAX_STORY_LINES)
        self._start = now
        self.tell(f"offered, deadline in {deadline - now:.3f} s", now)

    @property
    def state(self) -> TransferState:
        """Where the transfer is."""
        return self._state

    @property
    def is_terminal(self) -> bool:
        """Whether the transfer has ended."""
        return self._state in TERMINAL_STATES

    @property
    def story(self) -> tuple[str, ...]:
        """What happened, oldest first."""
        return tuple(self._story)

    def tell(self, line: str, now: float) -> None:
        """Add a line to the story."""
        self._story.append(f"+{now - self._start:.3f}s {line}")

    def advance(self, state: TransferState, why: str, now: float) -> None:
        """Move to another state.

        Raises:
            InvalidTransition: the state does not follow the present one.
        """
        if state not in _NEXT_STATES[self._state]:
            raise self.invalid(f"{why} -> {state}")
        self.tell(f"{self._state} -> {state}: {why}", now)
        self._state = state

    def invalid(self, event: str) -> InvalidTransition:
        """Build the error for an event that the present state does not allow."""
        return InvalidTransition(self.transfer_id, self._state, event, self.story)

    def is_overdue(self, now: float) -> bool:
        """Whether the deadline has passed."""
        return now >= self.deadline
