"""One transfer in the hands of the node that has the blocks."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from types import TracebackType
from typing import Protocol

import xxhash

from pdserve.kvtransfer.agreement import Agreement
from pdserve.kvtransfer.block_run import BlockRun, RunCutter
from pdserve.kvtransfer.block_source import BlockSource, compress_blocks
from pdserve.kvtransfer.compression import CompressionPolicy
from pdserve.kvtransfer.counters import TransferCounters
from pdserve.kvtransfer.credit import CreditGate
from pdserve.kvtransfer.encoding import Encoding
from pdserve.kvtransfer.errors import FailureCode, TransferError, TransferRefused
from pdserve.kvtransfer.field_checks import clip
from pdserve.kvtransfer.flight_window import FlightWindow
from pdserve.kvtransfer.frames import (
    MAX_BLOCKS_PER_MESSAGE,
    MAX_CODE_LENGTH,
    MAX_FRAME_BYTES,
    MAX_METADATA_BYTES,
    MAX_TEXT_LENGTH,
    Abort,
    Blocks,
    Done,
    Message,
)
from pdserve.kvtransfer.outgoing_session import (
    AnnounceGrant,
    End,
    Event,
    LocalAborted,
    OutgoingSession,
    SendAbort,
    Tick,
)
from pdserve.kvtransfer.shared_ring import SharedRing
from pdserve.kvtransfer.spans import DONE, Side, TransferMarks, TransferSpan


class SenderLink(Protocol):
    """What a transfer needs of its connection."""

    gate: CreditGate
    counters: TransferCounters
    max_message_bytes: int
    agreement: Agreement
    policy: CompressionPolicy
    window: FlightWindow
    ring: SharedRing | None

    def send(self, message: Message, payloads: Sequence[memoryview] = ()) -> None:
        """Hand a message to the socket without waiting; a failure ends the connection."""
        ...

    def forget(self, transfer: "OutgoingTransfer") -> None:
        """Take note that the transfer has ended."""
        ...


class OutgoingTransfer:
    """A transfer that was offered; as a context manager it aborts at exit if it is still open. Its owner
    awaits the grant, sends blocks, finishes or aborts; every method raises the TransferError that ended the
    transfer, once it has.

    Ownership: buffers given to `send_blocks` must not change until the transfer has ended. When `finish`
    returns the receiver has every byte. After an abort or a loss ZeroMQ may still hold references to
    buffers that it has not written out (the memory stays alive), and their owner may nevertheless reuse
    them at once: the receiver checks each block against the checksum taken when it was sent, and slots of a
    transfer without DONE are never committed, so bytes that change on the way can only end in a transfer
    that is over already.
    """

    def __init__(
        self, session: OutgoingSession, generation: int, link: SenderLink, num_tokens: int, label: str = ""
    ) -> None:
        self.transfer_id = session.course.transfer_id
        self.generation = generation
        self.session = session
        self._label = label
        self._link = link
        self._block_size_bytes = link.agreement.wire.block_size_bytes
        self._source = BlockSource(link.agreement, num_tokens, link.counters)
        self._bytes_sent = 0
        self._sent_in_layers: set[int] = set()
        self._counters = link.counters
        self._loop = asyncio.get_running_loop()
        self._answered = asyncio.Event()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._error: TransferError | None = None
        self._needed: tuple[int, ...] = ()
        self._marks = TransferMarks(link.counters, self._loop.time())
        self._timer = self._loop.call_at(session.course.deadline, self._on_deadline)

    async def __aenter__(self) -> "OutgoingTransfer":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.abort("abandoned", "its owner left it" if error is None else type(error).__name__)

    @property
    def error(self) -> TransferError | None:
        """Why the transfer ended; None while it is open and after a commit."""
        return self._error

    async def granted(self) -> tuple[int, ...]:
        """Wait for the receiver's answer; return the indexes of the blocks that it needs."""
        await self._answered.wait()
        self._raise_error()
        return self._needed

    async def send_blocks(self, blocks: Iterable[tuple[int, bytes | memoryview]]) -> None:
        """Send those of the blocks that the receiver needs, waiting for credit; the others are skipped.

        Indexes and buffers are in the sender's own layout. Where another one was agreed on for the wire, what is sent
        is cut from them, in a thread; a block that is not complete yet waits for the next call.

        Each buffer is C-contiguous and holds one block or several: the one at the index and those that follow it in
        the sender's layout. What lies together in memory leaves in one frame. May be called as often as blocks become
        ready. The buffers are taken from the iterable only as there is credit for them, so that generators that copy
        them out of a cache hold little more than the credit, however many transfers are open.

        Raises:
            ValueError: an index outside the offer, or a buffer of another size; blocks before it may have left.
            InvalidTransition: a block was sent before.
        """
        await self.granted()
        await self._send_runs(RunCutter(self._needed_runs(blocks)))

    async def _send_runs(self, runs: RunCutter) -> None:
        most = min(max(1, self._link.max_message_bytes // self._block_size_bytes), MAX_BLOCKS_PER_MESSAGE)
        while True:
            # Credit first: while there is none, nothing is taken from the caller.
            num_unsent = self.session.num_unsent
            num_claimed = await self._claim_credit(min(most, num_unsent)) if num_unsent else 0
            num_bytes_used = 0
            try:
                chosen = await self._take(runs, num_claimed or most)
                if chosen:
                    await self._send(chosen)
                    num_bytes_used = sum(run.buffer.nbytes for run in chosen)
            finally:
                self._link.gate.give(num_claimed * self._block_size_bytes - num_bytes_used)
            if runs.is_at_end:
                return
            await asyncio.sleep(0)  # credit that is there is no wait: others have their turn

    @property
    def takes_layers(self) -> bool:
        """Whether blocks may be sent layer by layer: their bytes travel as they are."""
        can_cut = self._link.agreement.piece_size_bytes < self._block_size_bytes
        return can_cut and not self._link.policy.is_compressing

    def are_layers_due(self, indexes: Iterable[int], num_layers: int, least_shared_bytes: int) -> bool:
        """Whether to send the first layers of blocks now: over shared memory once they are so many bytes.

        Never unless `takes_layers`: the wire's blocks may be others than those of these indexes.
        """
        if not self.takes_layers:
            return False
        if self._link.ring is None:
            return True
        end = num_layers * self._link.agreement.piece_size_bytes
        nums_sent = (self._num_bytes_sent(index) for index in indexes)
        return sum(max(0, end - num_sent) for num_sent in nums_sent if num_sent is not None) >= least_shared_bytes

    async def send_layers(self, blocks: Iterable[tuple[int, bytes | memoryview]], num_layers: int) -> None:
        """Send the first layers of blocks of which the others are not final yet, unless they have been sent.

        Each buffer is one whole block. `send_blocks` sends the rest. Without effect unless `takes_layers`.

        Raises:
            ValueError: an index outside the offer, or a buffer of another size; blocks before it may have left.
        """
        await self.granted()
        if self.takes_layers:
            end = num_layers * self._link.agreement.piece_size_bytes
            await self._send_runs(RunCutter(self._layer_runs(blocks, end)))

    async def finish(self, metadata: bytes) -> None:
        """Say that all needed blocks are sent and wait until the receiver has committed.

        Not retried: after an error here the receiver may or may not have committed (its acknowledgement can
        be lost).

        Raises:
            InvalidTransition: needed blocks have not been sent.
            ValueError: the metadata is too large.
        """
        if len(metadata) > MAX_METADATA_BYTES:
            raise ValueError(f"metadata has {len(metadata)} bytes, more than {MAX_METADATA_BYTES}")
        await self.granted()
        num_blocks = self.session.num_sent
        done = Done(
            self.transfer_id,
            self.generation,
            num_blocks,
            self._bytes_sent,
            metadata,
            xxhash.xxh3_64_intdigest(metadata),
        )
        self._marks.done(self._loop.time())
        self.session.finish(self._loop.time())
        self._link.send(done)
        error = await self.closed()
        if error is not None:
            raise error

    async def abort(self, code: str, message: str) -> None:
        """Give the transfer up and tell the receiver. Idempotent, and without effect once the transfer has
        ended."""
        self.handle(LocalAborted(code, message))

    async def closed(self) -> TransferError | None:
        """Wait until the transfer has ended; return why, or None if it was committed."""
        await asyncio.shield(self._ended)
        return self._error

    def handle(self, event: Event) -> None:
        """Feed an event to the session and perform what it says. For the connection."""
        for instruction in self.session.handle(event, self._loop.time()):
            match instruction:
                case AnnounceGrant(needed):
                    self._needed = needed
                    self._marks.granted(self._loop.time())
                    self._answered.set()
                case SendAbort(code, message):
                    why = clip(code, MAX_CODE_LENGTH) or FailureCode.PROTOCOL, clip(message, MAX_TEXT_LENGTH)
                    self._link.send(Abort(self.transfer_id, self.generation, *why))
                case End(error):
                    self._end(error)

    def span(self, peer_node_id: str) -> TransferSpan:
        """Return where the time of the transfer went; for the connection, once it has ended."""
        outcome = DONE if self._error is None else self._error.code
        durations = self._marks.durations(self._loop.time())
        counts = (self.session.num_sent, self._bytes_sent)
        return TransferSpan(self.transfer_id, self._label, Side.SENDER, peer_node_id, outcome, *durations, *counts)

    def _on_deadline(self) -> None:
        self.handle(Tick())
        if not self.session.course.is_terminal:  # a timer may come a clock tick early
            self._timer = self._loop.call_at(self.session.course.deadline, self._on_deadline)

    def _end(self, error: TransferError | None) -> None:
        self._error = error
        self._timer.cancel()
        if error is None:
            self._counters.completed += 1
            self._marks.acknowledged(self._loop.time())
        else:
            if isinstance(error, TransferRefused):
                self._counters.blocks_refused += self.session.num_blocks
            otherwise = "refused" if isinstance(error, TransferRefused) else "aborted"
            self._counters.count_failure(error.code, otherwise)
        self._answered.set()
        if not self._ended.done():
            self._ended.set_result(None)
        self._link.forget(self)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _needed_runs(self, blocks: Iterable[tuple[int, bytes | memoryview]]) -> Iterator[BlockRun]:
        """View the caller's buffers without what the receiver has, or cut the wire's blocks from them."""
        if self._source.is_cut:
            for block in self._source.wire_blocks(blocks, self.session.is_needed):
                if isinstance(block, BlockRun):
                    yield block
                else:
                    self._counters.blocks_skipped += 1
            return
        for index, buffer in blocks:
            run = BlockRun.of(index, buffer, self._block_size_bytes)
            if self.session.are_unsent(run.indexes):
                yield run
                continue
            for (num_sent, _), group in groupby(run.indexes, self._sent_so_far):
                indexes = list(group)
                if num_sent is None:
                    self._counters.blocks_skipped += len(indexes)
                elif 0 < num_sent < self._block_size_bytes:
                    yield from (run.part(index, 1).cut_start(num_sent) for index in indexes)
                elif not self._sent_in_layers.issuperset(indexes):  # of these nothing is left to send
                    yield run.part(indexes[0], len(indexes))

    def _layer_runs(self, blocks: Iterable[tuple[int, bytes | memoryview]], end: int) -> Iterator[BlockRun]:
        """View those bytes before `end` of each block that are needed and not sent."""
        for index, buffer in blocks:
            run = BlockRun.of(index, buffer, self._block_size_bytes)
            num_sent = self._num_bytes_sent(index)
            if num_sent is not None and num_sent < end:
                self._sent_in_layers.add(index)
                yield run.cut_start(num_sent).cut_end(end)

    def _sent_so_far(self, index: int) -> tuple[int | None, bool]:
        return self._num_bytes_sent(index), index in self._sent_in_layers

    def _num_bytes_sent(self, index: int) -> int | None:
        return self.session.num_bytes_sent(index) if self.session.is_needed(index) else None

    async def _claim_credit(self, max_blocks: int) -> int:
        claim = self._link.gate.claim(self._block_size_bytes, max_blocks)
        if claim.done():
            return claim.result()
        is_claimed = False
        try:
            either: set[asyncio.Future[int] | asyncio.Future[None]] = {claim, self._ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            self._raise_error()
            is_claimed = True
        finally:
            if not is_claimed:
                self._link.gate.withdraw(claim, self._block_size_bytes)
        return claim.result()

    async def _take(self, runs: RunCutter, most: int) -> list[BlockRun]:
        """Cutting is work for a processor; it must not hold the event loop up."""
        chosen = await asyncio.to_thread(runs.take, most) if self._source.is_cut else runs.take(most)
        self._raise_error()
        return chosen

    async def _send(self, runs: Sequence[BlockRun]) -> None:
        policy = self._link.policy
        indexes = tuple(index for run in runs for index in run.indexes)
        start, length = runs[0].start, runs[0].block_size_bytes
        encoding, blocks = Encoding.RAW, [block for run in runs for block in run.blocks()]
        if length == self._block_size_bytes and policy.choose(len(indexes)) != Encoding.RAW:
            encoding, blocks = await asyncio.to_thread(compress_blocks, blocks, policy)
            self._raise_error()
        sequence = self.session.take(indexes, self._loop.time(), start=start, length=length)
        checksums = tuple(xxhash.xxh3_64_intdigest(block) for block in blocks)
        places = self._share(blocks)
        header = Blocks(
            self.transfer_id,
            self.generation,
            sequence,
            encoding,
            start,
            length,
            places,
            indexes,
            tuple(block.nbytes for block in blocks),
            checksums,
        )
        frames = (
            [frame for run in runs for frame in run.frames(MAX_FRAME_BYTES)] if encoding == Encoding.RAW else blocks
        )
        self._link.send(header, () if places else frames)
        num_bytes = sum(header.sizes)
        policy.meter.sent(len(indexes) * length, num_bytes, self._loop.time())
        self._link.window.sent(self._loop.time())
        self._bytes_sent += num_bytes
        self._marks.block_moved(self._loop.time())
        self._counters.sent(len(indexes) if start == 0 else 0, num_bytes, self._loop.time())
        self._counters.bytes_shared += num_bytes if places else 0
        self._counters.blocks_compressed += 0 if encoding == Encoding.RAW else len(indexes)

    def _share(self, blocks: Sequence[memoryview]) -> tuple[int, ...]:
        """Copy a message's blocks into memory that the receiver reads; return their slots, or none if they must travel
        in frames."""
        ring = self._link.ring
        if ring is None or ring.num_free < len(blocks):
            return ()
        return tuple([ring.put(block) for block in blocks])
