"""The states of a request and the one table of allowed changes. Pure: no Redis, no clock."""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from pdserve.control.errors import IllegalTransition

MAX_STORY_ENTRIES = 32


class RequestStatus(StrEnum):
    """Where a request is; the last three are terminal."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing can follow."""
        return not TRANSITIONS[self]


_S = RequestStatus
TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.QUEUED: frozenset({_S.PREFILLING, _S.FAILED, _S.CANCELLED}),
    # DECODING without a transfer is local prefill; FINISHED is a first token that ends the request.
    _S.PREFILLING: frozenset({_S.TRANSFERRING, _S.DECODING, _S.FINISHED, _S.FAILED, _S.CANCELLED}),
    # Back to PREFILLING is a migration; FINISHED is a first token that ends the request while blocks move.
    _S.TRANSFERRING: frozenset({_S.PREFILLING, _S.DECODING, _S.FINISHED, _S.FAILED, _S.CANCELLED}),
    _S.DECODING: frozenset({_S.PREFILLING, _S.FINISHED, _S.FAILED, _S.CANCELLED}),
    _S.FINISHED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class StatusChange:
    """One step of a story: the status reached and why, in a few words."""

    status: RequestStatus
    note: str = ""

    def __str__(self) -> str:
        return f"{self.status} ({self.note})" if self.note else self.status.value


@dataclass(frozen=True, slots=True)
class StoryEntry:
    """A status change as it was written: `at_ms` is Redis' clock."""

    at_ms: int
    status: RequestStatus
    note: str


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is known beside the status; None means not known (yet), and leaves what is stored as it is."""

    num_attempts: int | None = None
    route: str | None = None
    prefill_node_id: str | None = None
    decode_node_id: str | None = None
    num_output_tokens: int | None = None
    finish_reason: str | None = None
    error_code: str | None = None

    def over(self, earlier: "RequestFacts") -> "RequestFacts":
        """Return these facts, and those of `earlier` where nothing is known here."""
        known = zip(_all_facts(self), _all_facts(earlier), strict=True)
        return RequestFacts(*[before if now is None else now for now, before in known])


_all_facts = attrgetter(*RequestFacts.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The durable truth about a request, as stored in Redis; no prompt and no token is in it."""

    request_id: str
    gateway_id: str
    status: RequestStatus
    num_prompt_tokens: int
    created_ms: int
    updated_ms: int
    facts: RequestFacts
    story: tuple[StoryEntry, ...]


def check_path(
    request_id: str, current: RequestStatus, path: tuple[StatusChange, ...], story: tuple[str, ...] = ()
) -> None:
    """Raise IllegalTransition unless every step of `path`, from `current` on, is in the table."""
    for change in path:
        if change.status not in TRANSITIONS[current]:
            raise IllegalTransition(request_id, current, change.status, (*story, current.value))
        story = (*story, current.value)
        current = change.status


class RequestProgress:
    """The status of one live request and its bounded story; every change goes through the table."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.status = RequestStatus.QUEUED
        self._story: deque[str] = deque([RequestStatus.QUEUED.value], maxlen=MAX_STORY_ENTRIES)

    def advance(self, target: RequestStatus, note: str = "") -> tuple[StatusChange, ...]:
        """Move to `target` and return the steps taken.

        A milestone that was reached although nobody reported it is filled in: a token proves a prefill. So a
        step that the table allows only by way of PREFILLING goes that way.
        """
        path: tuple[StatusChange, ...] = (StatusChange(target, note),)
        prefilling = RequestStatus.PREFILLING
        is_jump = target not in TRANSITIONS[self.status] and prefilling in TRANSITIONS[self.status]
        if is_jump and target in TRANSITIONS[prefilling]:
            path = (StatusChange(prefilling, "implied"), *path)
        check_path(self.request_id, self.status, path, tuple(self._story)[:-1])
        self._story.extend(str(change) for change in path)
        self.status = target
        return path
