"""One sender's connection to one receiver: handshake, liveness, credit, and the way of words to their
transfers.

ZeroMQ's own reconnection is off: a new connection is a new peer. A lost connection ends all of its
transfers at once.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from pdserve.kvtransfer.agreement import Agreement, Converter, agree
from pdserve.kvtransfer.compression import CompressionPolicy
from pdserve.kvtransfer.config import SenderConfig
from pdserve.kvtransfer.counters import TransferCounters
from pdserve.kvtransfer.credit import CreditGate
from pdserve.kvtransfer.encoding import readable_encodings
from pdserve.kvtransfer.errors import (
    FailureCode,
    FrameError,
    LayoutMismatch,
    PeerLost,
    TransferError,
    TransferRefused,
    UnsupportedVersion,
)
from pdserve.kvtransfer.flight_window import LEAST_BYTES, FlightWindow
from pdserve.kvtransfer.frames import (
    Abort,
    Credit,
    DoneAck,
    Grant,
    Heartbeat,
    Message,
    Offer,
    ProbeAck,
    Refuse,
    Refused,
    Welcome,
    decode,
    encode,
)
from pdserve.kvtransfer.greeting import make_hello
from pdserve.kvtransfer.layout import KVLayout
from pdserve.kvtransfer.message_port import MessagePort
from pdserve.kvtransfer.outgoing import OutgoingTransfer
from pdserve.kvtransfer.outgoing_session import (
    Acknowledged,
    ConnectionLost,
    Event,
    Granted,
    OutgoingSession,
    PeerAborted,
    WasRefused,
)
from pdserve.kvtransfer.peer_address import OfferTerms, PeerAddress, SenderIdentity
from pdserve.kvtransfer.probe import Prober
from pdserve.kvtransfer.ring_choice import share_memory
from pdserve.kvtransfer.session import TransferState
from pdserve.kvtransfer.shared_ring import SharedRing
from pdserve.kvtransfer.sockets import fastest_way, open_dealer, open_monitor

logger = logging.getLogger(__name__)

_REFUSED_EVENTS = frozenset({zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH})
_WATCHED_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class PeerConnection:
    """One DEALER. `run` is its whole life; before the handshake is through nothing is offered."""

    def __init__(
        self,
        peer: PeerAddress,
        identity: SenderIdentity,
        config: SenderConfig,
        counters: TransferCounters,
        on_lost: Callable[["PeerConnection"], None],
    ) -> None:
        self.peer = peer
        self.gate = CreditGate()
        self._lease_s = config.lease_s
        self.agreement = Agreement(identity.layout, identity.layout, identity.layout, Converter.NOBODY)
        self.policy = CompressionPolicy("none")
        self.window = FlightWindow(1, 1)
        self.max_message_bytes = config.max_message_bytes
        self._identity = identity
        self._config = config
        self.counters = counters
        self._on_lost = on_lost
        self._port: MessagePort | None = None
        self._transfers: dict[tuple[str, int], OutgoingTransfer] = {}
        self._transfer_ids: set[str] = set()
        self._next_generation = 1
        self.credit_bytes = 0
        self._is_reached = False  # somebody listens there
        self._is_welcome = False
        self._decided = asyncio.Event()  # the handshake is through, or the connection lost
        self._settled = asyncio.Event()  # and so is whether both ends share memory
        self._ring_offer: tuple[str, bytes] | None = None
        self.ring: SharedRing | None = None
        self._lost = asyncio.Event()
        self._error: TransferError | None = None
        self.prober = Prober(self)
        self._loop = asyncio.get_running_loop()
        self._last_heard = self._loop.time()

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Connect, serve until the connection is lost, close the socket."""
        keys, server_key = self._config.curve, self.peer.public_key
        if keys is not None and not keys.trusts(server_key or keys.public_key):
            text = f"{self.peer.endpoint}: {server_key} is not a trusted key"
            self.lose(TransferRefused(FailureCode.UNAUTHENTICATED, text))
            return
        endpoint = self.peer.endpoint
        if self._config.uses_shortcuts:
            endpoint = fastest_way(endpoint, self.peer.incarnation)
        socket = open_dealer(context, endpoint, self._config, server_key)
        monitor = open_monitor(context, socket, _WATCHED_EVENTS)
        try:
            self._port = port = MessagePort(socket)
            socket.connect(endpoint)
            self.send(make_hello(self._identity, self.peer, self._config))
            async with asyncio.TaskGroup() as group:
                loops = [
                    group.create_task(port.run(self._read), name="kv-sender-read"),
                    group.create_task(self._watch(monitor, port), name="kv-sender-watch"),
                    group.create_task(self._keep_alive(), name="kv-sender-keep-alive"),
                    group.create_task(self._share_memory(), name="kv-sender-share-memory"),
                ]
                await self._lost.wait()
                for loop in loops:
                    loop.cancel()
        except* (zmq.ZMQError, FrameError) as group_error:
            self.lose(_lost_by(self.peer.endpoint, group_error.exceptions[0]))
        finally:
            self.lose(PeerLost(f"the connection to {self.peer.endpoint} was closed", FailureCode.CLOSING))
            self._port = self.ring = None
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=round(self._config.linger_s * 1000))

    async def wait_ready(self) -> None:
        """Wait for the end of the handshake.

        Raises:
            LayoutMismatch, TransferRefused, PeerLost: the connection did not come to be, or is lost.
        """
        await self._settled.wait()
        if self._error is not None:
            raise self._error

    def offer(self, terms: OfferTerms) -> OutgoingTransfer:
        """Offer blocks over a connection that is ready.

        Raises:
            TransferRefused: a transfer of this id is open.
        """
        if self._error is not None:
            raise self._error
        if terms.transfer_id in self._transfer_ids:
            message = f"transfer {terms.transfer_id} is open already"
            raise TransferRefused(FailureCode.DUPLICATE_TRANSFER, message)
        now = self._loop.time()
        generation = self._next_generation
        self._next_generation += 1
        deadline_ms = max(1, round((terms.deadline - now) * 1000))
        offer = Offer(terms.transfer_id, generation, terms.block_hashes, terms.num_tokens, deadline_ms)
        header = encode(offer)
        session = OutgoingSession(
            terms.transfer_id,
            len(terms.block_hashes),
            self.agreement.wire.block_size_bytes,
            deadline=terms.deadline,
            now=now,
        )
        transfer = OutgoingTransfer(session, generation, self, terms.num_tokens, terms.label)
        self._transfers[terms.transfer_id, generation] = transfer
        self._transfer_ids.add(terms.transfer_id)
        self.counters.open += 1
        self._send_frames([header])
        return transfer

    def send(self, message: Message, payloads: Sequence[memoryview] = ()) -> None:
        """Hand a message to the socket without waiting; a failure ends the connection."""
        self._send_frames([encode(message), *payloads])

    def lose(self, error: TransferError) -> None:
        """End the connection and all of its transfers; the first reason stands."""
        if self._error is not None:
            return
        self._error = error
        if (
            not self._is_welcome and error.code != FailureCode.CLOSING
        ):  # transfers, of which there are none, count theirs
            self.counters.count_failure(error.code, "refused")
        self._on_lost(self)
        for transfer in list(self._transfers.values()):
            transfer.handle(ConnectionLost(error))
        self.prober.lose(error)
        self._decided.set()
        self._settled.set()
        self._lost.set()

    async def close(self, message: str) -> None:
        """Abort every open transfer, telling the receiver, and end the connection."""
        for transfer in list(self._transfers.values()):
            await transfer.abort(FailureCode.CLOSING, message)
        self.lose(PeerLost(message, FailureCode.CLOSING))

    def forget(self, transfer: OutgoingTransfer) -> None:
        """Take note that a transfer has ended."""
        del self._transfers[transfer.transfer_id, transfer.generation]
        self._transfer_ids.discard(transfer.transfer_id)
        self.counters.open -= 1
        if self._config.on_span is not None:
            self._config.on_span(transfer.span(self.peer.node_id))

    def _send_frames(self, frames: Sequence[bytes | memoryview]) -> None:
        if self._port is None or self._error is not None:
            return
        try:
            self._port.send(frames)
        except zmq.ZMQError as error:
            self.lose(PeerLost(f"cannot send to {self.peer.endpoint}: {error}{self._hint()}"))

    def _read(self, frames: list[zmq.Frame]) -> None:
        header, *payloads = frames
        self._receive(decode(header.buffer, len(payloads)))

    async def _watch(self, monitor: zmq.asyncio.Socket, port: MessagePort) -> None:
        while (event := parse_monitor_message(await monitor.recv_multipart()))["event"] == zmq.EVENT_CONNECTED:
            self._is_reached = True
        await port.wait_all_read()  # the last word of a receiver that closes may be an acknowledgement
        name = zmq.Event(event["event"]).name or "unknown event"
        if event["event"] in _REFUSED_EVENTS:
            text = f"{self.peer.endpoint} does not take this end ({name.lower()}{self._hint()})"
            self.lose(TransferRefused(FailureCode.UNAUTHENTICATED, text))
        is_silent = self._loop.time() - self._last_heard > self._lease_s / 2
        code = FailureCode.LEASE_EXPIRED if is_silent else FailureCode.PEER_LOST
        field = "key" if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL else None
        self.lose(PeerLost(f"the connection to {self.peer.endpoint} ended ({name.lower()}{self._hint()})", code, field))

    def _hint(self) -> str:
        """What to look at first; a receiver hangs up on a stranger without a reason, in any of several ways."""
        if self._is_welcome:
            return ""
        if not self._is_reached:
            return "; nobody listens there"
        return "; perhaps the keys of both ends differ, or one has none"

    async def _keep_alive(self) -> None:
        try:
            async with asyncio.timeout(self._config.handshake_timeout_s):
                await self._decided.wait()
        except TimeoutError:
            why = "; it listens, and is stopped, too busy, or no receiver" if self._is_reached else self._hint()
            self.lose(PeerLost(f"{self.peer.endpoint} did not answer the handshake{why}"))
            return
        max_silence_s = self._config.max_silence_s
        interval_s = min(self._lease_s, max_silence_s) / 3
        while True:
            self.send(Heartbeat(tuple(self._transfers)))
            before = self._loop.time()
            await asyncio.sleep(interval_s)
            now = self._loop.time()
            if now - before > interval_s + max_silence_s / 2:
                continue  # this process was stalled: read what the peer said before judging it
            if now - self._last_heard > max_silence_s:
                message = f"{self.peer.endpoint} said nothing for {max_silence_s:g} s"
                self.lose(PeerLost(message, FailureCode.LEASE_EXPIRED))
                return

    async def _share_memory(self) -> None:
        await self._decided.wait()
        wire = self.agreement.wire
        self.ring = await share_memory(self._ring_offer, self._config, self.credit_bytes, wire, self.counters)
        # What is under way should find room in the ring, and two messages are always: one lands, one follows. Frames
        # take the time of a copy on their way, so of these a third follows.
        most = self.credit_bytes if self.ring is None else min(self.ring.shape.size_bytes, self.credit_bytes)
        message_bytes = max(self.max_message_bytes, wire.block_size_bytes)
        num_messages = 3 if self.ring is None else 2
        self.window = FlightWindow(max(LEAST_BYTES, num_messages * message_bytes), most)
        self.gate.keep(self.credit_bytes - self.window.size_bytes)
        self._settled.set()

    def _receive(self, message: Message) -> None:
        self._last_heard = self._loop.time()
        match message:
            case Welcome():
                self._welcome(message)
            case Refused(code, text, layout):
                self.lose(self._refusal(code, text, layout))
            case Credit(num_bytes, places) if self._is_welcome:
                if places and (self.ring is None or not self.ring.free(places)):
                    raise FrameError("credit: places that are not in use")
                self.policy.meter.returned(num_bytes, self._loop.time())
                self.window.returned(num_bytes, self.gate.is_awaited, self._loop.time())
                self.gate.keep(self.credit_bytes - self.window.size_bytes)
                self.gate.give(num_bytes)
            case ProbeAck(sequence):
                self.prober.acknowledged(sequence)
            case Heartbeat(transfers) if self._is_welcome:
                self._heartbeat(transfers)
            case Grant(transfer_id, generation, needed) if self._is_welcome:
                self._pass_on(transfer_id, generation, Granted(needed))
            case Refuse(transfer_id, generation, code, text, retryable):
                self._pass_on(transfer_id, generation, WasRefused(code, text, retryable))
            case DoneAck(transfer_id, generation):
                self._pass_on(transfer_id, generation, Acknowledged())
            case Abort(transfer_id, generation, code, text):
                self._pass_on(transfer_id, generation, PeerAborted(code, text))
            case _:
                raise FrameError(f"a receiver does not say {type(message).__name__} here")

    def _welcome(self, message: Welcome) -> None:
        if self._is_welcome:
            raise FrameError("welcomed twice")
        if (message.node_id, message.incarnation) != (self.peer.node_id, self.peer.incarnation):
            text = f"{self.peer.endpoint} is {message.node_id}/{message.incarnation}, not {self.peer.node_id}/"
            self.lose(TransferRefused(FailureCode.WRONG_NODE, text + self.peer.incarnation, retryable=True))
            return
        try:
            self.agreement = self._agree(message.layout, takes_shards=True)  # or it would have refused
        except LayoutMismatch as error:
            self.lose(error)
            return
        if (message.wire, message.converter) != (self.agreement.wire, self.agreement.converter):
            self.lose(LayoutMismatch("wire", self.agreement.wire.to_wire(), message.wire.to_wire()))
            return
        self.policy = CompressionPolicy(self._config.compression, _common(message.encodings))
        self._lease_s = min(self._lease_s, message.lease_ms / 1000)
        self._is_welcome = True
        self._ring_offer = message.ring
        self.credit_bytes = message.credit_bytes
        self.gate.give(message.credit_bytes)
        self._decided.set()

    def _refusal(self, code: str, text: str, layout: KVLayout | None) -> TransferError:
        if self._is_welcome:
            return PeerLost(f"{self.peer.endpoint} ended the connection: {text}", code)
        if code == FailureCode.LAYOUT_MISMATCH and layout is not None:
            try:
                self._agree(layout, takes_shards=False)
            except LayoutMismatch as error:
                return error
        return TransferRefused(code, text, retryable=code != FailureCode.LAYOUT_MISMATCH)

    def _agree(self, layout: KVLayout, takes_shards: bool) -> Agreement:
        try:
            return agree(self._identity.layout, layout, self._config.wire_dtype, takes_shards=takes_shards)
        except LayoutMismatch as error:
            raise LayoutMismatch(error.field, error.theirs, error.ours) from None  # seen from this end

    def _heartbeat(self, open_transfers: tuple[tuple[str, int], ...]) -> None:
        """End what only one of both ends has open. An offer may still be on its way to the receiver; what it granted
        is listed until its last word about it."""
        listed = frozenset(open_transfers)
        for transfer_id, generation in listed - self._transfers.keys():
            self._disown(transfer_id, generation)
        for key, transfer in list(self._transfers.items()):
            if key not in listed and transfer.session.course.state is not TransferState.OFFERED:
                text = "the receiver does not list it any more"
                transfer.handle(ConnectionLost(PeerLost(text, FailureCode.UNKNOWN_TRANSFER)))

    def _pass_on(self, transfer_id: str, generation: int, event: Event) -> None:
        """Feed an event to its transfer. One that has ended has told the receiver so when it did."""
        transfer = self._transfers.get((transfer_id, generation))
        if transfer is not None:
            transfer.handle(event)

    def _disown(self, transfer_id: str, generation: int) -> None:
        text = "the sender has no such transfer"
        self.send(Abort(transfer_id, generation, FailureCode.UNKNOWN_TRANSFER, text))


def _lost_by(endpoint: str, error: Exception) -> TransferError:
    if isinstance(error, UnsupportedVersion):
        return TransferRefused(FailureCode.UNSUPPORTED_VERSION, f"{endpoint}: {error}")
    return PeerLost(f"{endpoint}: {error}")


def _common(encodings: tuple[str, ...]) -> tuple[str, ...]:
    """What the receiver can read and this end can write."""
    return tuple(encoding for encoding in readable_encodings() if encoding in encodings)
