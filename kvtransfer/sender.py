"""BlockSender: the end of the KV plane that has blocks to give."""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

import zmq.asyncio

from pdserve.kvtransfer.config import SenderConfig
from pdserve.kvtransfer.counters import PeerBook, PeerCounts, TransferCounts
from pdserve.kvtransfer.errors import (
    FailureCode,
    LayoutMismatch,
    TransferAborted,
    TransferRefused,
    TransferTimeout,
)
from pdserve.kvtransfer.frames import MAX_DEADLINE_S
from pdserve.kvtransfer.layout import KVLayout
from pdserve.kvtransfer.outgoing import OutgoingTransfer
from pdserve.kvtransfer.peer_address import OfferTerms, PeerAddress, SenderIdentity
from pdserve.kvtransfer.peer_connection import PeerConnection
from pdserve.kvtransfer.probe import MAX_PROBE_TOTAL_BYTES, LinkMeasurement
from pdserve.kvtransfer.task_set import TaskSet

_CLOSE_TIMEOUT_S = 1.0

BlockHasher = Callable[[int], Sequence[bytes]]  # from a block size


class BlockSender:
    """Owns one connection to each receiver that it has offered blocks to, opened at the first offer. What
    happens on one connection does not hold up another. Use as an async context manager."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        node_id: str,
        incarnation: str,
        layout: KVLayout,
        config: SenderConfig | None = None,
    ) -> None:
        self._context = context
        self._identity = SenderIdentity(node_id, incarnation, layout)
        self._config = config or SenderConfig()
        self._book = PeerBook()
        self._connections: dict[PeerAddress, PeerConnection] = {}
        self._tasks = TaskSet()
        self._num_offering = 0
        self._is_closing = False
        self._is_probing = False

    async def __aenter__(self) -> "BlockSender":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def counts(self) -> TransferCounts:
        """Return what has been moved so far."""
        return self._book.total()

    def peers(self) -> tuple[PeerCounts, ...]:
        """Return the same for each receiver."""
        return self._book.peers()

    def others(self) -> TransferCounts:
        """Return what none of them did: receivers of long ago."""
        return self._book.others()

    def may_send_layers(self, peer: PeerAddress, num_tokens: int, least_shared_bytes: int) -> bool:
        """Whether layers of a prompt's blocks can be due before they all are (see `OutgoingTransfer.are_layers_due`):
        yes as long as nothing is known of the receiver."""
        connection = self._connections.get(peer)
        if connection is None or connection.ring is None:
            return True
        wire = connection.agreement.wire
        return wire.num_blocks(num_tokens) * wire.block_size_bytes > least_shared_bytes

    async def watch(self) -> None:
        """Wait until the sender is closed.

        Raises:
            RuntimeError: one of its own tasks has failed.
        """
        await self._tasks.watch()

    async def offer(
        self,
        peer: PeerAddress,
        transfer_id: str,
        block_hashes: Sequence[bytes] | BlockHasher,
        num_tokens: int,
        deadline_s: float,
        *,
        label: str = "",
    ) -> OutgoingTransfer:
        """Offer blocks to a receiver, connecting to it first if need be.

        The caller owns the transfer: it ends in `finish` or `abort`, or `async with` aborts it. `deadline_s`
        bounds the whole transfer. The hashes are those of the receiver's blocks: given as a function of its block
        size, blocks of another size than the sender's can be offered; given as a list, only of the same. The label is
        what the transfer's span is told under.

        Raises:
            LayoutMismatch, TransferRefused, PeerLost, TransferTimeout: there is no transfer.
            ValueError: the number of hashes is not the number of blocks of `num_tokens`, or `deadline_s` is more than
                MAX_DEADLINE_S.
        """
        if not deadline_s <= MAX_DEADLINE_S:  # also of what is no number
            raise ValueError(f"deadline_s must be at most {MAX_DEADLINE_S}, got {deadline_s}")
        block_size = self._identity.layout.block_size
        if not callable(block_hashes):
            _check_number(block_hashes, num_tokens, block_size)
        if self._is_closing:
            raise TransferAborted(FailureCode.CLOSING, "the sender is closing", by_peer=False)
        if self._book.num_open() + self._num_offering >= self._config.max_open_transfers:
            message = f"{self._config.max_open_transfers} transfers are open"
            raise TransferRefused(FailureCode.OVERLOADED, message, retryable=True)
        deadline = asyncio.get_running_loop().time() + deadline_s
        connection = self._connections.get(peer) or self._connect(peer)
        self._num_offering += 1
        try:
            async with asyncio.timeout_at(deadline):
                await connection.wait_ready()
        except TimeoutError as error:
            raise TransferTimeout(f"{peer.endpoint} was not ready in {deadline_s:g} s") from error
        finally:
            self._num_offering -= 1
        wire_block_size = connection.agreement.wire.block_size
        if callable(block_hashes):
            block_hashes = block_hashes(wire_block_size)
            _check_number(block_hashes, num_tokens, wire_block_size)
        elif wire_block_size != block_size:
            raise LayoutMismatch("block_size", block_size, wire_block_size)
        return connection.offer(OfferTerms(transfer_id, tuple(block_hashes), num_tokens, deadline, label))

    async def probe(self, peer: PeerAddress, num_bytes: int, timeout_s: float) -> LinkMeasurement:
        """Measure the way to a receiver, connecting to it first if need be. One probe runs at a time.

        Raises:
            LayoutMismatch, TransferRefused, PeerLost, TransferTimeout: what is wrong with it.
            ValueError: more bytes than MAX_PROBE_TOTAL_BYTES.
        """
        if not 0 < num_bytes <= MAX_PROBE_TOTAL_BYTES:
            raise ValueError(f"num_bytes must be in [1, {MAX_PROBE_TOTAL_BYTES}], got {num_bytes}")
        if self._is_probing or self._is_closing:
            raise TransferRefused(FailureCode.OVERLOADED, "another probe is running", retryable=True)
        self._is_probing = True
        try:
            async with asyncio.timeout(timeout_s):
                return await self._measure(peer, num_bytes)
        except TimeoutError as error:
            raise TransferTimeout(f"{peer.endpoint} was not measured in {timeout_s:g} s") from error
        finally:
            self._is_probing = False

    async def _measure(self, peer: PeerAddress, num_bytes: int) -> LinkMeasurement:
        loop = asyncio.get_running_loop()
        start = loop.time()
        is_new = peer not in self._connections
        connection = self._connections.get(peer) or self._connect(peer)
        await connection.wait_ready()
        connect_s = loop.time() - start if is_new else None
        round_trip_s = await connection.prober.round_trip_s()
        transfer_s = await connection.prober.transfer_s(num_bytes)
        return LinkMeasurement(
            connect_s, round_trip_s, num_bytes, transfer_s, self._config.curve is not None, connection.ring is not None
        )

    async def close(self) -> None:
        """Abort what is open, tell the receivers, close every connection. Takes at most 2 s."""
        self._is_closing = True
        for connection in list(self._connections.values()):
            await connection.close("the sender is closing")
        await self._tasks.wait(_CLOSE_TIMEOUT_S / 2)
        await self._tasks.close(_CLOSE_TIMEOUT_S / 2)

    def _connect(self, peer: PeerAddress) -> PeerConnection:
        connection = PeerConnection(peer, self._identity, self._config, self._book.of(peer.node_id), self._forget)
        self._connections[peer] = connection
        self._tasks.spawn(connection.run(self._context), name=f"kv-sender-{peer.node_id}")
        return connection

    def _forget(self, connection: PeerConnection) -> None:
        if self._connections.get(connection.peer) is connection:
            del self._connections[connection.peer]


def _check_number(block_hashes: Sequence[bytes], num_tokens: int, block_size: int) -> None:
    if num_tokens <= 0 or len(block_hashes) != -(-num_tokens // block_size):
        raise ValueError(f"{num_tokens} tokens do not make {len(block_hashes)} blocks of {block_size}")
