"""The sender's half of a transfer as a pure state machine: events in, instructions out."""

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.kvtransfer.errors import (
    FailureCode,
    TransferAborted,
    TransferError,
    TransferRefused,
    TransferTimeout,
    error_of_abort,
)
from pdserve.kvtransfer.session import TransferCourse, TransferState


@dataclass(frozen=True, slots=True)
class Granted:
    """The receiver has reserved slots for these indexes."""

    needed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WasRefused:
    """The receiver declined the offer."""

    code: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The receiver has committed."""


@dataclass(frozen=True, slots=True)
class PeerAborted:
    """The receiver gave the transfer up."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class LocalAborted:
    """The owner of the blocks gives the transfer up."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """There is nobody left to tell."""

    error: TransferError


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Granted | WasRefused | Acknowledged | PeerAborted | LocalAborted | ConnectionLost | Tick


@dataclass(frozen=True, slots=True)
class AnnounceGrant:
    """Tell whoever waits which blocks are needed."""

    needed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Tell the receiver that the transfer is off."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class End:
    """The transfer is over, committed (None) or with an error; nothing follows."""

    error: TransferError | None


Instruction = AnnounceGrant | SendAbort | End


class OutgoingSession:
    """One transfer as its sender sees it. Exactly one `End` is ever returned, at the latest at the
    deadline."""

    def __init__(
        self, transfer_id: str, num_blocks: int, block_size_bytes: int, *, deadline: float, now: float
    ) -> None:
        self.course = TransferCourse(transfer_id, deadline, now)
        self.num_blocks = num_blocks
        self.block_size_bytes = block_size_bytes
        self._unsent: dict[int, int] = {}  # to the bytes of each that have been sent
        self._sent: set[int] = set()
        self._num_messages = 0

    @property
    def num_sent(self) -> int:
        """Blocks that have been handed to the connection."""
        return len(self._sent)

    @property
    def num_unsent(self) -> int:
        """Blocks that the receiver still waits for."""
        return len(self._unsent)

    def handle(self, event: Event, now: float) -> tuple[Instruction, ...]:
        """Take one event in and say what follows. After the end every event is without effect."""
        if self.course.is_terminal:
            return ()
        match event:
            case Granted(needed):
                return self._granted(needed, now)
            case WasRefused(code, message, retryable):
                if self.course.state is not TransferState.OFFERED:
                    return self._break_off(FailureCode.PROTOCOL, "refused after a grant", now)
                return self._end(TransferRefused(code, message, retryable), now)
            case Acknowledged():
                return self._acknowledged(now)
            case PeerAborted(code, message):
                return self._end(error_of_abort(code, message), now)
            case LocalAborted(code, message):
                return self._break_off(code, message, now)
            case ConnectionLost(error):
                return self._end(error, now)
            case Tick():
                return self._tick(now)

    def is_needed(self, index: int) -> bool:
        """Whether the receiver asked for this block.

        Raises:
            InvalidTransition: no grant has arrived yet.
            ValueError: the index is outside the offer.
        """
        if self.course.state is TransferState.OFFERED:
            raise self.course.invalid("send_blocks")
        if not 0 <= index < self.num_blocks:
            raise ValueError(f"block {index} is outside [0, {self.num_blocks})")
        return index in self._unsent or index in self._sent

    def are_unsent(self, indexes: range) -> bool:
        """Whether all of these blocks are needed and nothing of them has been sent."""
        return all(self._unsent.get(index) == 0 for index in indexes)

    def num_bytes_sent(self, index: int) -> int:
        """How many bytes of a needed block have been sent, from its start on."""
        return self._unsent.get(index, self.block_size_bytes)

    def take(self, indexes: Iterable[int], now: float, *, start: int = 0, length: int | None = None) -> int:
        """Record that these needed blocks, or `length` bytes of each from `start` on, are being sent in one message;
        return that message's sequence number.

        Raises:
            InvalidTransition: not in a state to send, or these bytes are not the next of each block.
        """
        chosen = tuple(indexes)
        end = self.block_size_bytes if length is None else start + length
        if self.course.state not in (TransferState.GRANTED, TransferState.SENDING):
            raise self.course.invalid("send_blocks")
        if any(self._unsent.get(index) != start for index in chosen) or len(set(chosen)) != len(chosen):
            raise self.course.invalid(f"send_blocks of {sorted(chosen)[:8]}, some of them sent before,")
        if self.course.state is TransferState.GRANTED:
            self.course.advance(TransferState.SENDING, f"{len(chosen)} blocks", now)
        if end < self.block_size_bytes:
            self._unsent.update(dict.fromkeys(chosen, end))
        else:
            for index in chosen:
                del self._unsent[index]
            self._sent.update(chosen)
        self._num_messages += 1
        return self._num_messages - 1

    def finish(self, now: float) -> None:
        """Record that DONE is being sent.

        Raises:
            InvalidTransition: needed blocks have not been sent, or this is not a state to finish from.
        """
        if self._unsent:
            raise self.course.invalid(f"finish with {len(self._unsent)} needed blocks unsent")
        self.course.advance(TransferState.FINISHING, f"{len(self._sent)} blocks sent", now)

    def _granted(self, needed: tuple[int, ...], now: float) -> tuple[Instruction, ...]:
        if self.course.state is not TransferState.OFFERED:
            return self._break_off(FailureCode.PROTOCOL, "granted twice", now)
        if len(set(needed)) != len(needed) or any(not 0 <= index < self.num_blocks for index in needed):
            return self._break_off(FailureCode.PROTOCOL, "granted blocks that were not offered", now)
        self.course.advance(TransferState.GRANTED, f"{len(needed)} of {self.num_blocks} needed", now)
        self._unsent = dict.fromkeys(needed, 0)
        return (AnnounceGrant(needed),)

    def _acknowledged(self, now: float) -> tuple[Instruction, ...]:
        if self.course.state is not TransferState.FINISHING:
            return self._break_off(FailureCode.PROTOCOL, "acknowledged before done", now)
        self.course.advance(TransferState.DONE, "acknowledged", now)
        return (End(None),)

    def _tick(self, now: float) -> tuple[Instruction, ...]:
        if not self.course.is_overdue(now):
            return ()
        message = f"transfer {self.course.transfer_id} was {self.course.state} at its deadline"
        return (SendAbort(FailureCode.DEADLINE, message), *self._end(TransferTimeout(message), now))

    def _break_off(self, code: str, message: str, now: float) -> tuple[Instruction, ...]:
        return (SendAbort(code, message), *self._end(TransferAborted(code, message, by_peer=False), now))

    def _end(self, error: TransferError, now: float) -> tuple[Instruction, ...]:
        self.course.advance(TransferState.ABORTED, str(error), now)
        return (End(error),)
