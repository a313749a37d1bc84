"""BlockReceiver: the end of the KV plane that takes blocks in."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hmac import compare_digest

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from pdserve.kvtransfer.config import ReceiverConfig
from pdserve.kvtransfer.counters import PeerBook, PeerCounts, TransferCounts
from pdserve.kvtransfer.errors import FailureCode, FrameError, TransferError, TransferRefused, UnsupportedVersion
from pdserve.kvtransfer.field_checks import clip
from pdserve.kvtransfer.frames import (
    MAX_BLOCKS_PER_MESSAGE,
    MAX_TEXT_LENGTH,
    Abort,
    Blocks,
    Done,
    Heartbeat,
    Hello,
    Message,
    Offer,
    Probe,
    Refused,
    decode,
    encode,
)
from pdserve.kvtransfer.greeting import check_hello
from pdserve.kvtransfer.incoming import IncomingTransfer, ReceiverParts
from pdserve.kvtransfer.incoming_session import (
    BlocksArrived,
    DoneArrived,
    Failed,
    IncomingSession,
    PeerAborted,
    PeerVanished,
)
from pdserve.kvtransfer.layout import KVLayout
from pdserve.kvtransfer.message_port import MessagePort
from pdserve.kvtransfer.offer_check import TransferKey, refusal_of
from pdserve.kvtransfer.peer_address import check_node
from pdserve.kvtransfer.ring_door import RingDoor
from pdserve.kvtransfer.sending_peer import SendingPeer
from pdserve.kvtransfer.shard_gathering import ShardSink, gathering
from pdserve.kvtransfer.shared_ring import RingView
from pdserve.kvtransfer.sink import BlockSink
from pdserve.kvtransfer.sockets import listening
from pdserve.kvtransfer.task_set import TaskSet

logger = logging.getLogger(__name__)

LOOPBACK = "tcp://127.0.0.1:0"
_GRACE_S = 1.0
_CLOSE_TIMEOUT_S = 0.5
_PROBE_DELAY_S = 0.02


class BlockReceiver:
    """Owns one ROUTER, the peers connected to it and their open transfers; the slots are the sink's business.

    Invariant: a transfer is in `_transfers` from its offer until the sink holds nothing open for it.
    """

    def __init__(
        self,
        *,
        node_id: str,
        incarnation: str,
        layout: KVLayout,
        sink: BlockSink,
        config: ReceiverConfig | None = None,
    ) -> None:
        self.endpoint = ""
        self._node_id = node_id
        self._incarnation = incarnation
        self._layout = layout
        self._sink = sink
        self._config = config or ReceiverConfig()
        self._credit_bytes = max(self._config.credit_bytes, layout.block_size_bytes)
        self._book = PeerBook()
        self._peers: dict[bytes, SendingPeer] = {}
        self._transfers: dict[TransferKey, IncomingTransfer] = {}
        self._loops = TaskSet()
        self._tasks = TaskSet()
        self._shards = gathering(sink, layout, self._tasks, self._end_shard)
        self._port: MessagePort | None = None
        self._door: RingDoor | None = None
        self._is_closing = False
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    @asynccontextmanager
    async def bind(
        cls,
        context: zmq.asyncio.Context,
        endpoint: str = LOOPBACK,
        *,
        node_id: str,
        incarnation: str,
        layout: KVLayout,
        sink: BlockSink,
        config: ReceiverConfig | None = None,
    ) -> AsyncIterator["BlockReceiver"]:
        """Listen on `endpoint` (loopback unless told otherwise; port 0 takes a free one) until the block is left.

        Raises:
            ValueError: the endpoint is open to other machines, and the config has no keys and no `allow_plaintext`; or
                a name of the node is empty or too long.
        """
        check_node(node_id, incarnation)
        receiver = cls(node_id=node_id, incarnation=incarnation, layout=layout, sink=sink, config=config)
        config = receiver._config
        on_stranger = receiver._count_stranger
        async with listening(context, endpoint, layout, config, incarnation, on_stranger) as (socket, monitor, address):
            try:
                receiver._start(socket, monitor, address)
                yield receiver
            finally:
                await receiver._close()

    def counts(self) -> TransferCounts:
        """Return what has been moved so far."""
        return self._book.total()

    def peers(self) -> tuple[PeerCounts, ...]:
        """Return the same for each sender."""
        return self._book.peers()

    def others(self) -> TransferCounts:
        """Return what none of them did: senders of long ago, and strangers."""
        return self._book.others()

    async def idle(self) -> None:
        """Wait until no transfer is open and the sink holds nothing for any."""
        await self._idle.wait()

    async def watch(self) -> None:
        """Wait until the receiver is closed.

        Raises:
            RuntimeError: one of its own tasks has failed; it does not serve any more.
        """
        await self._loops.watch()

    async def abort(self, transfer_id: str, code: str, message: str) -> None:
        """End a transfer from this side: the sender is told, the sink releases. Without effect on unknown
        ids and once the commit has begun."""
        for first_head in self._layout.heads:
            self._end_shard(transfer_id, first_head, code, message)

    def _end_shard(self, transfer_id: str, first_head: int, code: str, message: str) -> None:
        transfer = self._transfers.get((transfer_id, first_head))
        if transfer is not None:
            transfer.post(Failed(code, message))

    def _count_stranger(self) -> None:
        self._book.strangers.failures[FailureCode.UNAUTHENTICATED] += 1

    def _start(self, socket: zmq.Socket[bytes], monitor: zmq.asyncio.Socket, address: str) -> None:
        self._port = MessagePort(socket)
        self.endpoint = address
        self._loops.spawn(self._port.run(self._read), name="kv-receiver-read")
        self._loops.spawn(self._watch_connections(monitor), name="kv-receiver-watch")
        if self._config.uses_shared_memory:
            self._door = RingDoor.bind(self._admit_ring)
        if self._door is not None:
            self._loops.spawn(self._door.run(), name="kv-receiver-door")

    async def _close(self) -> None:
        """End every transfer, telling the senders; takes at most 2 s whatever the sink does."""
        self._is_closing = True
        for transfer in self._transfers.values():
            transfer.post(Failed(FailureCode.CLOSING, "the receiver is closing"))
        await self._tasks.wait(_GRACE_S)
        await self._tasks.close(_CLOSE_TIMEOUT_S)
        for peer in list(self._peers.values()):
            self._refuse(peer.identity, FailureCode.CLOSING, "the receiver is closing")
        await self._loops.close(_CLOSE_TIMEOUT_S)
        if self._door is not None:
            self._door.close()
        self._port = None

    def _read(self, frames: list[zmq.Frame]) -> None:
        identity, *others = frames
        self._receive(identity.bytes, others)

    async def _watch_connections(self, monitor: zmq.asyncio.Socket) -> None:
        """Find out whose connection has ended: the event does not say, but a ROUTER refuses to send to who
        is gone. The event comes a moment before that; if the probe is too early, the next heartbeat finds
        out."""
        loop = asyncio.get_running_loop()
        while True:
            if parse_monitor_message(await monitor.recv_multipart())["event"] == zmq.EVENT_DISCONNECTED:
                loop.call_later(_PROBE_DELAY_S, self._probe)
            else:
                self._count_stranger()

    def _probe(self) -> None:
        for peer in list(self._peers.values()):
            self._send_heartbeat(peer)

    async def _keep_alive(self, peer: SendingPeer) -> None:
        max_silence_s = self._config.max_silence_s
        if not await peer.wait_ended(max_silence_s, lambda: self._send_heartbeat(peer)):
            self._drop(peer, f"{peer.node_id} said nothing for {max_silence_s:g} s", FailureCode.LEASE_EXPIRED)

    def _send_heartbeat(self, peer: SendingPeer) -> None:
        self._send(peer, Heartbeat(tuple(peer.transfers)))

    def _receive(self, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        peer = self._peers.get(identity)
        try:
            if not 1 <= len(frames) <= 1 + MAX_BLOCKS_PER_MESSAGE:
                raise FrameError(f"a message of {len(frames)} frames")
            payloads = tuple(frame.buffer for frame in frames[1:])
            message = decode(frames[0].buffer, len(payloads))
            if isinstance(message, Hello):
                self._greet(identity, message)
            elif peer is None:
                self._refuse(identity, FailureCode.NO_HANDSHAKE, "say hello first")
            else:
                self._dispatch(peer, message, payloads)
        except FrameError as error:
            is_version = isinstance(error, UnsupportedVersion)
            code = FailureCode.UNSUPPORTED_VERSION if is_version else FailureCode.PROTOCOL
            (self._book.strangers if peer is None else peer.counters).failures[code] += 1
            if peer is not None:
                logger.warning("%s breaks the protocol: %s", peer.node_id, error)
                self._drop(peer, str(error))
            self._refuse(identity, code, str(error))

    def _dispatch(self, peer: SendingPeer, message: Message, payloads: tuple[memoryview, ...]) -> None:
        now = asyncio.get_running_loop().time()
        peer.last_heard = now
        match message:
            case Offer():
                self._accept(peer, message, now)
            case Blocks(transfer_id, generation):
                payloads = peer.payloads(message, payloads)
                self._take_blocks(peer, message, payloads, self._find(peer, transfer_id, generation))
            case Done(transfer_id, generation):
                transfer = self._find(peer, transfer_id, generation)
                if transfer is not None:
                    transfer.post_control(DoneArrived(message))
                else:
                    self._disown(peer, transfer_id, generation)
            case Abort(transfer_id, generation, code, text):
                transfer = self._find(peer, transfer_id, generation)
                if transfer is not None:
                    transfer.post_control(PeerAborted(code, text))
            case Probe():
                self._send(peer, peer.drop_probe(message, payloads))
            case Heartbeat(transfers):
                self._compare(peer, frozenset(transfers))
            case _:
                raise FrameError(f"a sender does not say {type(message).__name__}")

    def _greet(self, identity: bytes, hello: Hello) -> None:
        if identity in self._peers:
            raise FrameError("hello twice on one connection")
        try:
            takes_shards = self._shards is not None
            agreement = check_hello(hello, self._node_id, self._incarnation, self._layout, takes_shards)
        except TransferError as error:
            self._book.strangers.failures[error.code] += 1
            self._refuse(identity, error.code, error.message)
            return
        for peer in list(self._peers.values()):
            if peer.node_id == hello.node_id:  # a peer that connects again is a new peer
                self._drop(peer, f"{hello.node_id} connected again")
                self._refuse(peer.identity, FailureCode.PEER_LOST, "superseded by a newer connection")
        if len(self._peers) >= self._config.max_peers or self._is_closing:
            self._refuse(identity, FailureCode.OVERLOADED, f"{len(self._peers)} senders are connected")
            return
        lease_s = min(self._config.lease_s, max(hello.lease_ms, 1) / 1000)
        peer = SendingPeer(
            identity,
            hello,
            lease_s=lease_s,
            credit_bytes=self._credit_bytes,
            agreement=agreement,
            counters=self._book.of(hello.node_id),
            now=asyncio.get_running_loop().time(),
        )
        self._peers[identity] = peer
        self._send(peer, peer.welcome(self._node_id, self._incarnation, self._door.name if self._door else None))
        self._loops.spawn(self._keep_alive(peer), name=f"kv-receiver-keep-alive-{hello.node_id}")

    def _admit_ring(self, token: bytes, ring: RingView) -> bool:
        """Give the sender to which the token was told its shared memory, once."""
        for peer in self._peers.values():
            if peer.ring is None and compare_digest(peer.ring_token, token):
                peer.ring = ring
                return True
        return False

    def _accept(self, peer: SendingPeer, offer: Offer, now: float) -> None:
        refusal = refusal_of(offer, peer.first_head, self._layout, self._transfers.keys(), self._config)
        if self._is_closing:
            refusal = TransferRefused(FailureCode.CLOSING, "the receiver is closing", retryable=True)
        if refusal is not None:
            self._send(peer, peer.refuse(offer, refusal))
            return
        session = IncomingSession(
            offer.transfer_id,
            len(offer.block_hashes),
            peer.agreement.wire.block_size_bytes,
            piece_size_bytes=peer.agreement.piece_size_bytes,
            deadline=now + offer.deadline_ms / 1000,
            now=now,
        )
        sink = self._sink if self._shards is None else ShardSink(self._shards, peer.agreement.wire.heads)
        transfer = IncomingTransfer(offer, peer, session, ReceiverParts(sink, self._config, self._send))
        self._transfers[offer.transfer_id, peer.first_head] = transfer
        peer.transfers.add((offer.transfer_id, offer.generation))
        peer.counters.open += 1
        self._idle.clear()
        self._tasks.spawn(self._run(transfer), name=f"kv-incoming-{offer.transfer_id}")

    async def _run(self, transfer: IncomingTransfer) -> None:
        try:
            await transfer.run()
        finally:
            del self._transfers[transfer.transfer_id, transfer.peer.first_head]
            transfer.peer.transfers.discard((transfer.transfer_id, transfer.generation))
            transfer.peer.counters.open -= 1
            if self._config.on_span is not None:
                self._config.on_span(transfer.span())
            if not self._transfers:
                self._idle.set()

    def _take_blocks(
        self,
        peer: SendingPeer,
        header: Blocks,
        payloads: tuple[memoryview, ...],
        transfer: IncomingTransfer | None,
    ) -> None:
        is_charged = peer.charge(header, payloads)
        if transfer is None:
            if is_charged and (credit := peer.hand_back(header, payloads)) is not None:
                self._send(peer, credit)
            self._disown(peer, header.transfer_id, header.generation)
        elif is_charged:
            transfer.post(BlocksArrived(header, payloads))
        else:
            transfer.post_control(Failed(FailureCode.OVER_CREDIT, "blocks without credit"))

    def _find(self, peer: SendingPeer, transfer_id: str, generation: int) -> IncomingTransfer | None:
        """Return the peer's transfer, if it is open here."""
        is_there = (transfer_id, generation) in peer.transfers
        return self._transfers[transfer_id, peer.first_head] if is_there else None

    def _compare(self, peer: SendingPeer, listed: frozenset[tuple[str, int]]) -> None:
        """End what only one of both ends has open. Offers and aborts come in order with heartbeats, so neither is
        merely on its way."""
        for transfer_id, generation in listed - peer.transfers:
            self._disown(peer, transfer_id, generation)
        for transfer_id, _ in peer.transfers - listed:
            text = "the sender does not list it any more"
            self._transfers[transfer_id, peer.first_head].post_control(Failed(FailureCode.UNKNOWN_TRANSFER, text))

    def _disown(self, peer: SendingPeer, transfer_id: str, generation: int) -> None:
        text = "the receiver has no such transfer"
        self._send(peer, Abort(transfer_id, generation, FailureCode.UNKNOWN_TRANSFER, text))

    def _drop(self, peer: SendingPeer, message: str, code: str = FailureCode.PEER_LOST) -> None:
        """Forget a peer and end its transfers."""
        if peer.dropped.is_set():
            return
        peer.dropped.set()
        del self._peers[peer.identity]
        peer.ring = None  # what is being landed from it holds it a little longer
        for transfer_id, _ in list(peer.transfers):
            self._transfers[transfer_id, peer.first_head].post(PeerVanished(message, code))

    def _refuse(self, identity: bytes, code: str, message: str) -> None:
        self._send_frames(identity, Refused(code, clip(message, MAX_TEXT_LENGTH), self._layout))

    def _send(self, peer: SendingPeer, message: Message) -> None:
        if not peer.dropped.is_set() and not self._send_frames(peer.identity, message):
            code = peer.cause_of_end(asyncio.get_running_loop().time())
            self._drop(peer, f"the connection of {peer.node_id} has ended", code)

    def _send_frames(self, identity: bytes, message: Message) -> bool:
        """Hand a message to the socket without waiting; False if that peer is gone or does not read."""
        if self._port is None:
            return False
        try:
            self._port.send([identity, encode(message)])
        except zmq.ZMQError as error:
            logger.debug("cannot send to a peer: %s", error)
            return False
        return True
