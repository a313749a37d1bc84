"""Errors of the control plane.

PdserveError
└── ControlError
    ├── MessageError                 a peer sent what we cannot read
    │   ├── UnknownVersion
    │   ├── UnknownTag
    │   └── MalformedMessage         names the field
    ├── ChannelLost                  the peer behind a channel is gone or does not read
    ├── RedisUnavailable             Redis did not answer in time, or not usefully
    ├── RecordMissing                no such request record (expired, or Redis lost it)
    ├── RecordExists                 a request id was used twice
    ├── IllegalTransition            a status change outside the table; carries the story
    ├── TransitionConflict           compare-and-set found another status; carries the story
    ├── NodeIdTaken                  another incarnation holds a live lease on this node id
    └── TaskError                    a node cannot finish a task; becomes the TaskFailed that the gateway gets
"""

from pdserve.engine.errors import PdserveError


class ControlError(PdserveError):
    """Root of the errors of what processes say to each other."""


class MessageError(ControlError):
    """A message that cannot be read; the receiver counts it and goes on."""


class UnknownVersion(MessageError):
    """The peer speaks another protocol version."""


class UnknownTag(MessageError):
    """The peer said something that this version has no message for."""


class MalformedMessage(MessageError):
    """A known message with a missing, superfluous, wrongly typed or oversized part; `where` is its path."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class ChannelLost(ControlError):
    """The peer behind a channel is gone, never answered, or has stopped reading."""


class RedisUnavailable(ControlError):
    """Redis did not answer in time or answered with an error; the cause is chained."""


class RecordMissing(ControlError):
    """There is no record of the request: it expired, or Redis was emptied."""


class RecordExists(ControlError):
    """The request id is already in use."""


class IllegalTransition(ControlError):
    """A status change that the table of transitions does not allow; the text tells the request's story."""

    def __init__(self, request_id: str, current: str, target: str, story: tuple[str, ...]) -> None:
        told = " -> ".join(story)
        super().__init__(f"request {request_id}: {current} -> {target} is not allowed (story: {told})")
        self.request_id = request_id
        self.current = current
        self.target = target
        self.story = story


class TransitionConflict(ControlError):
    """The stored status is not the expected one: somebody else changed the record."""

    def __init__(self, request_id: str, expected: str, found: str, story: tuple[str, ...]) -> None:
        told = " -> ".join(story)
        super().__init__(f"request {request_id}: expected {expected}, found {found} (story: {told})")
        self.request_id = request_id
        self.expected = expected
        self.found = found
        self.story = story


class NodeIdTaken(ControlError):
    """Another process registered the same node id and its lease is alive."""

    def __init__(self, node_id: str, holder: str) -> None:
        super().__init__(
            f"node id {node_id!r} is held by incarnation {holder}: give this node another id or stop that one"
        )
        self.node_id = node_id
        self.holder = holder


class TaskError(ControlError):
    """A node's reason for not finishing a task; `retryable` means that another attempt may succeed."""

    def __init__(self, code: str, message: str, retryable: bool) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retryable = retryable
