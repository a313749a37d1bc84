"""The receiver's half of a transfer as a pure state machine: events in, instructions out.

Whoever drives it performs the instructions in order and completely before it hands in the next event; only a
reservation runs meanwhile. So a release can never overlap a write into the same slots.
"""

from dataclasses import dataclass

import xxhash

from pdserve.kvtransfer.encoding import Encoding
from pdserve.kvtransfer.errors import FailureCode
from pdserve.kvtransfer.frames import Blocks, Done
from pdserve.kvtransfer.session import TransferCourse, TransferState


@dataclass(frozen=True, slots=True)
class Reserved:
    """The sink holds slots for these indexes of the offer."""

    needed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReserveRefused:
    """The sink holds nothing for the offer."""

    code: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class BlocksArrived:
    """A Blocks message with its payload frames."""

    header: Blocks
    payloads: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class DoneArrived:
    """The sender says that it has sent everything."""

    header: Done


@dataclass(frozen=True, slots=True)
class PeerAborted:
    """The sender gave the transfer up."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Something on this side ends the transfer: its owner, a broken rule, a failed write, a closing
    receiver."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class PeerVanished:
    """The sender's connection has ended; there is nobody to tell."""

    message: str
    code: str = FailureCode.PEER_LOST


@dataclass(frozen=True, slots=True)
class Committed:
    """The sink has taken the blocks over."""


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The sink owns the blocks but cannot use them."""

    message: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Reserved
    | ReserveRefused
    | BlocksArrived
    | DoneArrived
    | PeerAborted
    | Failed
    | PeerVanished
    | Committed
    | CommitFailed
    | Tick
)


@dataclass(frozen=True, slots=True)
class SendGrant:
    """Tell the sender which blocks to send."""

    needed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendRefuse:
    """Tell the sender that nothing is held for its offer."""

    code: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class CancelReserve:
    """Stop the reservation; then report `Reserved` if it was too late, else `ReserveRefused`."""


@dataclass(frozen=True, slots=True)
class Land:
    """Write verified blocks, or from the byte `start` on a piece of each, into their slots, decoded and converted; on
    failure report `Failed`."""

    blocks: tuple[tuple[int, memoryview], ...]
    encoding: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """Give the slots to the sink for good; then report `Committed` or `CommitFailed`."""

    metadata: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """Have the sink free the slots of the transfer."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SendDoneAck:
    """Tell the sender that the blocks are taken over."""


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Tell the sender that the transfer is off."""

    code: str
    message: str


Instruction = SendGrant | SendRefuse | CancelReserve | Land | Commit | Release | SendDoneAck | SendAbort


class IncomingSession:
    """One transfer as its receiver sees it; created with its reservation under way.

    Invariant: over its life it returns exactly one of Commit and Release if a `Reserved` came in, else
    neither.
    """

    def __init__(
        self,
        transfer_id: str,
        num_blocks: int,
        block_size_bytes: int,
        *,
        piece_size_bytes: int | None = None,
        deadline: float,
        now: float,
    ) -> None:
        self.course = TransferCourse(transfer_id, deadline, now)
        self.failure: tuple[str, str] | None = None  # code, message
        self.was_refused = False
        self._num_blocks = num_blocks
        self._block_size_bytes = block_size_bytes
        self._piece_size_bytes = piece_size_bytes or block_size_bytes  # blocks may come in multiples of this
        self._is_reserving = True
        self._missing: dict[int, int] = {}  # to the bytes of each that have arrived
        self._landed: set[int] = set()
        self._num_messages = 0
        self._num_bytes = 0

    @property
    def is_settled(self) -> bool:
        """Whether the transfer has ended and no reservation can still come out of it."""
        return self.course.is_terminal and not self._is_reserving

    @property
    def num_landed(self) -> int:
        """Blocks that were verified and handed to the sink whole."""
        return len(self._landed)

    @property
    def num_messages(self) -> int:
        """Messages of blocks that have come in order."""
        return self._num_messages

    def handle(self, event: Event, now: float) -> tuple[Instruction, ...]:
        """Take one event in and say what follows.

        Raises:
            InvalidTransition: the driver reported something that it was not asked for.
        """
        if isinstance(event, Reserved | ReserveRefused | Committed | CommitFailed):
            return self._reported(event, now)
        if self.course.is_terminal or self.course.state is TransferState.FINISHING:
            return ()  # too late to matter: the slots have their owner
        match event:
            case BlocksArrived(header, payloads):
                return self._blocks(header, payloads, now)
            case DoneArrived(header):
                return self._done(header, now)
            case PeerAborted(code, message):
                return self._abort(code, message, now, tell_peer=False)
            case PeerVanished(message, code):
                return self._abort(code, message, now, tell_peer=False)
            case Failed(code, message):
                return self._abort(code, message, now)
            case Tick():
                if not self.course.is_overdue(now):
                    return ()
                return self._abort(FailureCode.DEADLINE, f"the transfer was {self.course.state}", now)

    def _reported(
        self, event: Reserved | ReserveRefused | Committed | CommitFailed, now: float
    ) -> tuple[Instruction, ...]:
        """Take in what came of an instruction."""
        match event:
            case Reserved(needed):
                return self._reserved(needed, now)
            case ReserveRefused(code, message, retryable):
                return self._reserve_refused(code, message, retryable, now)
            case Committed():
                self.course.advance(TransferState.DONE, "committed", now)
                return (SendDoneAck(),)
            case CommitFailed(message):
                if self.course.state is not TransferState.FINISHING:
                    raise self.course.invalid("commit failed")
                self._fail(FailureCode.COMMIT_FAILED, message, now)
                return (SendAbort(FailureCode.COMMIT_FAILED, message),)

    def _reserved(self, needed: tuple[int, ...], now: float) -> tuple[Instruction, ...]:
        self._take_reservation("reserved")
        if self.course.is_terminal:
            code, message = self.failure or (FailureCode.RESERVE_FAILED, "ended while reserving")
            return (Release(code, message),)
        if len(set(needed)) != len(needed) or any(not 0 <= index < self._num_blocks for index in needed):
            message = f"the sink asked for blocks outside the offer of {self._num_blocks}"
            self._fail(FailureCode.RESERVE_FAILED, message, now)
            refuse = SendRefuse(FailureCode.RESERVE_FAILED, message, retryable=False)
            return (refuse, Release(FailureCode.RESERVE_FAILED, message))
        self._missing = dict.fromkeys(needed, 0)
        self.course.advance(TransferState.GRANTED, f"{len(needed)} of {self._num_blocks} needed", now)
        return (SendGrant(needed),)

    def _reserve_refused(self, code: str, message: str, retryable: bool, now: float) -> tuple[Instruction, ...]:
        self._take_reservation("reserve refused")
        if self.course.is_terminal:
            return ()
        self._fail(code, message, now)
        self.was_refused = True
        return (SendRefuse(code, message, retryable),)

    def _take_reservation(self, event: str) -> None:
        if not self._is_reserving:
            raise self.course.invalid(event)
        self._is_reserving = False

    def _blocks(self, header: Blocks, payloads: tuple[memoryview, ...], now: float) -> tuple[Instruction, ...]:
        if self.course.state is TransferState.OFFERED:
            return self._abort(FailureCode.NOT_GRANTED, "blocks before the grant", now)
        if header.sequence != self._num_messages:
            message = f"blocks message {header.sequence} came as number {self._num_messages}"
            return self._abort(FailureCode.WRONG_SEQUENCE, message, now)
        self._num_messages += 1
        if self.course.state is TransferState.GRANTED:
            self.course.advance(TransferState.SENDING, f"{len(header.indexes)} blocks", now)
        if header.start % self._piece_size_bytes or header.length % self._piece_size_bytes or header.length == 0:
            message = f"bytes {header.start} to {header.start + header.length} are no layers of a block"
            return self._abort(FailureCode.WRONG_SIZE, message, now)
        blocks = _cut(payloads, header.sizes)
        end = header.start + header.length
        are_sizes_right = self._are_sizes_right(header)
        for index, size, checksum, block in zip(header.indexes, header.sizes, header.checksums, blocks, strict=True):
            is_size_right = are_sizes_right and block.nbytes == size
            fault = self._fault(index, header.start, is_size_right, checksum, block)
            if fault is not None:
                return self._abort(fault, f"block {index} of {self._num_blocks}", now)
            self._missing[index] = end
            if end == self._block_size_bytes:
                del self._missing[index]
                self._landed.add(index)
            self._num_bytes += size
        if sum(payload.nbytes for payload in payloads) != sum(header.sizes):
            return self._abort(FailureCode.WRONG_SIZE, "frames beyond the blocks", now)
        return (Land(tuple(zip(header.indexes, blocks, strict=True)), header.encoding, header.start),)

    def _are_sizes_right(self, header: Blocks) -> bool:
        """Whether every size is the piece's, or less where a whole block is compressed."""
        if header.encoding == Encoding.RAW:
            is_right = header.sizes.count(header.length) == len(header.sizes)
        else:
            is_right = min(header.sizes) > 0 and max(header.sizes) <= header.length == self._block_size_bytes
        return is_right and header.start + header.length <= self._block_size_bytes

    def _fault(
        self, index: int, start: int, is_size_right: bool, checksum: int, payload: memoryview
    ) -> FailureCode | None:
        if index in self._landed:
            return FailureCode.DUPLICATE_BLOCK
        num_arrived = self._missing.get(index)
        if num_arrived is None:
            return FailureCode.NOT_GRANTED
        if start != num_arrived:
            return FailureCode.DUPLICATE_BLOCK if start < num_arrived else FailureCode.WRONG_SEQUENCE
        if not is_size_right:
            return FailureCode.WRONG_SIZE
        if xxhash.xxh3_64_intdigest(payload) != checksum:
            return FailureCode.WRONG_CHECKSUM
        return None

    def _done(self, header: Done, now: float) -> tuple[Instruction, ...]:
        if self.course.state is TransferState.OFFERED:
            return self._abort(FailureCode.NOT_GRANTED, "done before the grant", now)
        if self._missing or header.num_blocks != len(self._landed) or header.num_bytes != self._num_bytes:
            message = (
                f"done says {header.num_blocks} blocks of {header.num_bytes} bytes; {len(self._landed)} of "
                f"{self._num_bytes} bytes have arrived, {len(self._missing)} are missing"
            )
            return self._abort(FailureCode.INCOMPLETE, message, now)
        if xxhash.xxh3_64_intdigest(header.metadata) != header.checksum:
            return self._abort(FailureCode.WRONG_CHECKSUM, "metadata of done", now)
        self.course.advance(TransferState.FINISHING, f"{len(self._landed)} blocks landed", now)
        return (Commit(header.metadata),)

    def _abort(self, code: str, message: str, now: float, *, tell_peer: bool = True) -> tuple[Instruction, ...]:
        self._fail(code, message, now)
        tell = (SendAbort(code, message),) if tell_peer else ()
        if self._is_reserving:
            return (*tell, CancelReserve())
        return (*tell, Release(code, message))

    def _fail(self, code: str, message: str, now: float) -> None:
        self.course.advance(TransferState.ABORTED, f"{code}: {message}", now)
        self.failure = (code, message)


def _cut(frames: tuple[memoryview, ...], sizes: tuple[int, ...]) -> list[memoryview]:
    """Divide frames into blocks; one that the frames do not hold whole comes out short."""
    blocks: list[memoryview] = []
    remaining = iter(frames)
    frame = memoryview(b"")
    for size in sizes:
        if frame.nbytes == 0:
            frame = next(remaining, frame)
        blocks.append(frame[:size])
        frame = frame[size:]
    return blocks
