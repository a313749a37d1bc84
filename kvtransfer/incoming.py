"""One transfer on the node that receives: drives the session and performs its instructions on the sink."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pdserve.kvtransfer.block_decoder import BlockDecoder, UnusableBlock
from pdserve.kvtransfer.config import ReceiverConfig
from pdserve.kvtransfer.errors import FailureCode, TransferRefused
from pdserve.kvtransfer.field_checks import clip
from pdserve.kvtransfer.frames import (
    MAX_CODE_LENGTH,
    MAX_TEXT_LENGTH,
    Abort,
    DoneAck,
    Grant,
    Message,
    Offer,
    Refuse,
)
from pdserve.kvtransfer.incoming_session import (
    BlocksArrived,
    CancelReserve,
    Commit,
    CommitFailed,
    Committed,
    Event,
    Failed,
    IncomingSession,
    Instruction,
    Land,
    Release,
    Reserved,
    ReserveRefused,
    SendAbort,
    SendDoneAck,
    SendGrant,
    SendRefuse,
    Tick,
)
from pdserve.kvtransfer.sending_peer import SendingPeer
from pdserve.kvtransfer.session import TransferState
from pdserve.kvtransfer.sink import BlockSink
from pdserve.kvtransfer.spans import DONE, Side, TransferMarks, TransferSpan

logger = logging.getLogger(__name__)

_MAX_CONTROL_FRAMES = 16
_MAX_LANDED_BYTES = 16 * 1024 * 1024  # with one call of the sink, so that a device that computes is held up briefly


@dataclass(frozen=True, slots=True)
class ReceiverParts:
    """What the transfers of one receiver share."""

    sink: BlockSink
    config: ReceiverConfig
    send: Callable[[SendingPeer, Message], None]


class IncomingTransfer:
    """Owns the inbox of one transfer and every call into the sink for it, one at a time. The inbox is
    bounded: by the credit for blocks, by a small number for everything else."""

    def __init__(self, offer: Offer, peer: SendingPeer, session: IncomingSession, parts: ReceiverParts) -> None:
        self.transfer_id = offer.transfer_id
        self.generation = offer.generation
        self.peer = peer
        self.session = session
        self._offer = offer
        self._sink = parts.sink
        self._config = parts.config
        self._counters = peer.counters
        self._decoder = BlockDecoder(peer.agreement, peer.counters)
        self._send = parts.send
        self._inbox: deque[Event] = deque()
        self._num_control_frames = 0
        self._arrived = asyncio.Event()
        self._reserving: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._marks = TransferMarks(peer.counters, self._loop.time())
        self._num_bytes = 0
        self._timer = self._loop.call_at(session.course.deadline, self._on_deadline)

    def post(self, event: Event) -> None:
        """Queue an event of this side, or blocks that were charged to the peer's credit."""
        self._inbox.append(event)
        self._arrived.set()

    def post_control(self, event: Event) -> None:
        """Queue an event that a frame without payload stands for; a flood of them ends the transfer."""
        self._num_control_frames += 1
        if self._num_control_frames == _MAX_CONTROL_FRAMES:
            event = Failed(FailureCode.PROTOCOL, "the sender floods the transfer")
        if self._num_control_frames <= _MAX_CONTROL_FRAMES:
            self.post(event)

    async def run(self) -> None:
        """Drive the transfer to its end; at return the sink holds nothing open for it."""
        async with asyncio.TaskGroup() as group:
            self._reserving = group.create_task(self._reserve(), name=f"kv-reserve-{self.transfer_id}")
            try:
                while not self.session.is_settled:
                    await self._handle(await self._next_event())
            except asyncio.CancelledError:
                await self._wind_up(FailureCode.CLOSING, "the receiver is closing")
                raise
            except Exception as error:
                logger.exception("transfer %s: ended by a defect", self.transfer_id)
                await self._wind_up(FailureCode.PROTOCOL, f"{type(error).__name__} in the receiver")
            finally:
                self._timer.cancel()
                self._drop_inbox()
                self._count()

    def span(self) -> TransferSpan:
        """Return where the time of the transfer went, once it has ended."""
        outcome = DONE if self.session.failure is None else self.session.failure[0]
        durations = self._marks.durations(self._loop.time())
        counts = (self.session.num_landed, self._num_bytes)
        return TransferSpan(self.transfer_id, "", Side.RECEIVER, self.peer.node_id, outcome, *durations, *counts)

    async def _wind_up(self, code: str, message: str) -> None:
        """End the transfer from within whatever it was doing."""
        if self.session.course.state is TransferState.FINISHING:
            await self._handle(CommitFailed(message))
        else:
            await self._handle(Failed(code, message))
        if not self.session.is_settled:
            following = await self._cancel_reserve()
            if following is not None:
                await self._handle(following)
        while self._inbox and not self.session.is_settled:
            await self._handle(self._inbox.popleft())

    async def _next_event(self) -> Event:
        while not self._inbox:
            self._arrived.clear()
            await self._arrived.wait()
        return self._inbox.popleft()

    def _on_deadline(self) -> None:
        self.post(Tick())
        if self._loop.time() < self.session.course.deadline:  # a timer may come a clock tick early
            self._timer = self._loop.call_at(self.session.course.deadline, self._on_deadline)

    async def _handle(self, event: Event) -> None:
        if isinstance(event, BlocksArrived):
            await self._take_blocks(event)
        else:
            await self._follow(self.session.handle(event, self._loop.time()))

    async def _take_blocks(self, first: BlocksArrived) -> None:
        """Verify blocks and land them, together with those that came while others were being landed."""
        taken = [first]
        try:
            instructions = self.session.handle(first, self._loop.time())
            while (following := self._next_like(taken)) is not None and _is_landing(instructions):
                self._inbox.popleft()
                taken.append(following)
                instructions = _joined(instructions, self.session.handle(following, self._loop.time()))
            await self._follow(instructions)
        finally:
            for event in taken:
                self._return_credit(event)

    def _next_like(self, taken: Sequence[BlocksArrived]) -> BlocksArrived | None:
        """Return the next event if it is of blocks that can be landed with those."""
        event = self._inbox[0] if self._inbox else None
        if not isinstance(event, BlocksArrived):
            return None
        first, size_bytes = taken[0].header, sum(sum(each.header.sizes) for each in (*taken, event))
        is_like = (event.header.start, event.header.encoding) == (first.start, first.encoding)
        return event if is_like and size_bytes <= _MAX_LANDED_BYTES else None

    async def _follow(self, instructions: tuple[Instruction, ...]) -> None:
        """Perform instructions, and those that what came of them leads to."""
        while instructions:
            following: Event | None = None
            for instruction in instructions:
                following = await self._perform(instruction) or following
            instructions = () if following is None else self.session.handle(following, self._loop.time())

    async def _perform(self, instruction: Instruction) -> Event | None:
        """Carry an instruction out; return the event that it leads to, if any."""
        match instruction:
            case SendGrant(needed):
                self._marks.granted(self._loop.time())
                self._counters.blocks_skipped += len(self._offer.block_hashes) - len(needed)
                self._send(self.peer, Grant(self.transfer_id, self.generation, needed))
            case SendRefuse(code, message, retryable):
                refuse = Refuse(self.transfer_id, self.generation, _code(code), _text(message), retryable)
                self._send(self.peer, refuse)
            case SendAbort(code, message):
                self._send(self.peer, Abort(self.transfer_id, self.generation, _code(code), _text(message)))
            case SendDoneAck():
                self._marks.acknowledged(self._loop.time())
                self._send(self.peer, DoneAck(self.transfer_id, self.generation))
            case CancelReserve():
                return await self._cancel_reserve()
            case Land():
                return await self._land(instruction)
            case Commit(metadata):
                return await self._commit(metadata)
            case Release(code, message):
                await self._release(code, message)
        return None

    async def _reserve(self) -> None:
        try:
            needed = await self._sink.reserve(self.transfer_id, self._offer.block_hashes, self._offer.num_tokens)
        except TransferRefused as error:
            self.post(ReserveRefused(error.code, error.message, error.retryable))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # What the sink waited for was cancelled, not this: the sender must not wait for an answer.
            self.post(ReserveRefused(FailureCode.RESERVE_FAILED, "the reservation was given up", retryable=True))
        except Exception as error:
            logger.exception("transfer %s: the sink failed to reserve", self.transfer_id)
            message = f"{type(error).__name__} while reserving"
            self.post(ReserveRefused(FailureCode.RESERVE_FAILED, message, retryable=True))
        else:
            if self.session.is_settled:  # nobody waits any more for a reservation that would not be cancelled
                await self._release(FailureCode.CLOSING, "reserved after the end of the transfer")
            else:
                self.post(Reserved(_indexes(needed)))

    async def _cancel_reserve(self) -> Event | None:
        assert self._reserving is not None
        self._reserving.cancel()
        await asyncio.wait({self._reserving}, timeout=self._config.release_timeout_s)
        if not self._reserving.done():
            logger.error("transfer %s: the sink does not stop reserving", self.transfer_id)
        elif not self._reserving.cancelled():
            return None  # too late to cancel: what came of it is in the inbox
        return ReserveRefused(FailureCode.CLOSING, "the reservation was cancelled", retryable=True)

    async def _land(self, land: Land) -> Event | None:
        self._marks.block_moved(self._loop.time())
        try:
            async with asyncio.timeout_at(self.session.course.deadline):
                blocks = await self._decoder.decode(land)
                await self._sink.land(self.transfer_id, blocks, land.start)
        except UnusableBlock as error:
            return Failed(error.code, str(error))
        except TimeoutError:
            return Failed(FailureCode.DEADLINE, "landing blocks took until the deadline")
        except TransferRefused as error:  # its owner has ended it: nothing is wrong here
            return Failed(error.code, error.message)
        except Exception as error:
            logger.exception("transfer %s: the sink failed to land blocks", self.transfer_id)
            return Failed(FailureCode.LAND_FAILED, f"{type(error).__name__} while landing blocks")
        num_bytes = sum(payload.nbytes for _, payload in land.blocks)
        self._num_bytes += num_bytes
        num_blocks = len(land.blocks) if land.start == 0 else 0
        self._counters.received(num_blocks, num_bytes, self._loop.time())
        return None

    async def _commit(self, metadata: bytes) -> Event:
        self._marks.done(self._loop.time())
        try:
            async with asyncio.timeout_at(self.session.course.deadline):
                await self._sink.commit(self.transfer_id, metadata)
        except TimeoutError:
            return CommitFailed("taking the blocks over took until the deadline")
        except TransferRefused as error:
            return CommitFailed(str(error))
        except Exception as error:
            logger.exception("transfer %s: the sink failed to commit", self.transfer_id)
            return CommitFailed(f"{type(error).__name__} while committing")
        return Committed()

    async def _release(self, code: str, message: str) -> None:
        try:
            async with asyncio.timeout(self._config.release_timeout_s):
                await self._sink.release(self.transfer_id, code, message)
        except TimeoutError:
            logger.error("transfer %s: the sink does not release", self.transfer_id)
        except Exception:
            logger.exception("transfer %s: the sink failed to release", self.transfer_id)

    def _return_credit(self, event: BlocksArrived) -> None:
        credit = self.peer.hand_back(event.header, event.payloads)
        if credit is not None:
            self._send(self.peer, credit)

    def _drop_inbox(self) -> None:
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, BlocksArrived):
                self._return_credit(event)

    def _count(self) -> None:
        if self.session.failure is None:
            self._counters.completed += 1
            return
        if self.session.was_refused:
            self._counters.blocks_refused += len(self._offer.block_hashes)
        otherwise = "refused" if self.session.was_refused else "aborted"
        self._counters.count_failure(self.session.failure[0], otherwise)


def _is_landing(instructions: tuple[Instruction, ...]) -> bool:
    return len(instructions) == 1 and isinstance(instructions[0], Land)


def _joined(before: tuple[Instruction, ...], after: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """Make one landing of two that follow each other; what a later message leads to comes after."""
    first, second = before[0], after[0] if after else None
    assert isinstance(first, Land)
    if not isinstance(second, Land):
        return (*before, *after)
    return (replace(first, blocks=first.blocks + second.blocks), *after[1:])


def _indexes(needed: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(int(index) for index in needed)
    except (TypeError, ValueError):
        return (-1,)  # in no offer: the session refuses it and has the sink release


def _code(code: str) -> str:
    return clip(code, MAX_CODE_LENGTH) or FailureCode.PROTOCOL


def _text(message: str) -> str:
    return clip(message, MAX_TEXT_LENGTH)
