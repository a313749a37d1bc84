"""Errors of kvtransfer.

KVTransferError
├── FrameError                 bytes from a peer that are not a message of this protocol
│   └── UnsupportedVersion     a message of another protocol version
├── InvalidTransition          a step that its session does not allow; carries the session's story
└── TransferError              a transfer that did not happen: code, message, retryable
    ├── TransferRefused        the receiver said no before any byte moved
    ├── TransferAborted        either side gave the transfer up
    ├── IntegrityError         bytes arrived wrong, twice, unasked for or not at all
    ├── LayoutMismatch         no conversion leads from one end's blocks to the other's; names the field
    ├── PeerLost               the connection or the lease of the peer ended
    └── TransferTimeout        the transfer's own deadline passed

`retryable` means that a fresh transfer, here or to another node, may succeed; nothing is retried by this
library.
"""

from enum import StrEnum


class FailureCode(StrEnum):
    """Why a transfer ended without a commit, in this library's own words. Owners of transfers add their own
    codes."""

    UNKNOWN_TRANSFER = "unknown_transfer"
    DUPLICATE_TRANSFER = "duplicate_transfer"
    OVERLOADED = "overloaded"
    DEADLINE = "deadline"
    LEASE_EXPIRED = "lease_expired"
    PEER_LOST = "peer_lost"
    CLOSING = "closing"
    PROTOCOL = "protocol"
    UNSUPPORTED_VERSION = "unsupported_version"
    NO_HANDSHAKE = "no_handshake"
    UNAUTHENTICATED = "unauthenticated"
    WRONG_NODE = "wrong_node"
    LAYOUT_MISMATCH = "layout_mismatch"
    OVER_CREDIT = "over_credit"
    NOT_GRANTED = "not_granted"
    DUPLICATE_BLOCK = "duplicate_block"
    WRONG_SEQUENCE = "wrong_sequence"
    WRONG_SIZE = "wrong_size"
    WRONG_CHECKSUM = "wrong_checksum"
    WRONG_ENCODING = "wrong_encoding"
    WRONG_SCALE = "wrong_scale"
    INCOMPLETE = "incomplete"
    RESERVE_FAILED = "reserve_failed"
    LAND_FAILED = "land_failed"
    COMMIT_FAILED = "commit_failed"
    WRONG_SHARD = "wrong_shard"
    SHARD_LOST = "shard_lost"


INTEGRITY_CODES = frozenset(
    {
        FailureCode.OVER_CREDIT,
        FailureCode.NOT_GRANTED,
        FailureCode.DUPLICATE_BLOCK,
        FailureCode.WRONG_SEQUENCE,
        FailureCode.WRONG_SIZE,
        FailureCode.WRONG_CHECKSUM,
        FailureCode.WRONG_ENCODING,
        FailureCode.WRONG_SCALE,
        FailureCode.INCOMPLETE,
    }
)


class KVTransferError(Exception):
    """Root of every error that kvtransfer raises on purpose."""


class FrameError(KVTransferError, ValueError):
    """Bytes that are not a message of this protocol."""


class UnsupportedVersion(FrameError):
    """A message of a protocol version that this end does not speak."""


class InvalidTransition(KVTransferError, RuntimeError):
    """A session was asked for a step that its state does not allow; the story tells how it got there."""

    def __init__(self, transfer_id: str, start: str, event: str, story: tuple[str, ...]) -> None:
        lines = "".join(f"\n  {line}" for line in story)
        super().__init__(f"transfer {transfer_id}: {event} is not allowed when {start}; its story:{lines}")
        self.transfer_id = transfer_id
        self.start = start
        self.event = event
        self.story = story


class TransferError(KVTransferError):
    """A transfer that did not happen."""

    def __init__(self, code: str, message: str, retryable: bool) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retryable = retryable


class TransferRefused(TransferError):
    """The receiver said no before any byte moved; a sink raises it from `reserve`."""

    def __init__(self, code: str, message: str, retryable: bool = False) -> None:
        super().__init__(code, message, retryable)


class TransferAborted(TransferError):
    """One of the two sides gave the transfer up; `by_peer` says which."""

    def __init__(self, code: str, message: str, by_peer: bool) -> None:
        super().__init__(code, message, retryable=True)
        self.by_peer = by_peer


class IntegrityError(TransferError):
    """The receiver got bytes that were wrong, repeated, unasked for or missing."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message, retryable=True)


class LayoutMismatch(TransferError):
    """No conversion leads from one end's blocks to the other's."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        message = f"{field} differs: ours is {ours!r}, theirs is {theirs!r}"
        super().__init__(FailureCode.LAYOUT_MISMATCH, message, retryable=False)
        self.field = field
        self.ours = ours
        self.theirs = theirs


class PeerLost(TransferError):
    """The connection to the peer, or its lease, ended. `field` names what probably differs if that was in the
    handshake of ZeroMQ.
    """

    def __init__(self, message: str, code: str = FailureCode.PEER_LOST, field: str | None = None) -> None:
        super().__init__(code, message, retryable=True)
        self.field = field


class TransferTimeout(TransferError):
    """The deadline given with the offer passed."""

    def __init__(self, message: str) -> None:
        super().__init__(FailureCode.DEADLINE, message, retryable=True)


def error_of_abort(code: str, message: str) -> TransferError:
    """Build the error that a peer's Abort stands for."""
    if code in INTEGRITY_CODES:
        return IntegrityError(code, message)
    if code == FailureCode.DEADLINE:
        return TransferTimeout(message)
    if code in (FailureCode.LEASE_EXPIRED, FailureCode.PEER_LOST):
        return PeerLost(message, code)
    return TransferAborted(code, message, by_peer=True)
