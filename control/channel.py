"""The control plane's sockets: a node binds a `ControlServer`, a gateway connects one `ControlClient` to each
node.

A client has a fresh identity for each connection and never reconnects: a lost connection is a lost peer, and
what belonged to it ends. Sends never wait: a peer that does not read is treated as gone. With keys (CURVE) all is
encrypted and only holders of a trusted key are heard or told anything.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from pdserve.control.codec import MAX_MESSAGE_BYTES, decode, encode
from pdserve.control.errors import ChannelLost, MessageError
from pdserve.control.message_reader import MessageReader
from pdserve.control.messages import (
    CancelTask,
    DecodeTask,
    LinkReport,
    Ping,
    Pong,
    PrefillTask,
    ProbeLink,
    StageReport,
    TaskFailed,
    ToGateway,
    TokenBatch,
    TokenChunk,
    ToNode,
)
from pdserve.kvtransfer.curve_keys import CurveKeys as CurveKeys
from pdserve.kvtransfer.sockets import NEVER_MS, guard, guarded_context, present
from pdserve.kvtransfer.task_set import TaskSet

logger = logging.getLogger(__name__)

Peer = bytes
_IPV4 = re.compile(r"tcp://(\d+\.\d+\.\d+\.\d+|\*):")
_HIGH_WATER_MESSAGES = 16_384
_LINGER_MS = 200
_HANDSHAKE_MS = 3_000
_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 3
_DONTWAIT, _SNDMORE = int(zmq.DONTWAIT), int(zmq.SNDMORE)
_CLOSE_TIMEOUT_S = 0.5
_REFUSAL_LOG_S = 60.0
# "Without detail" is a peer that hung up first, as one without a key does once it sees that one is wanted.
_REFUSED_EVENTS = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_LOST_EVENTS = zmq.Event.DISCONNECTED | zmq.Event.CLOSED | _REFUSED_EVENTS
_TO_GATEWAY = (TokenBatch, StageReport, Pong, TaskFailed, LinkReport)
_PERHAPS_KEYS = "perhaps the keys of both ends differ, or one has none"


class ControlServer:
    """The node's end: hears any gateway, answers by peer.

    A message that cannot be read, and an answer to a gateway that is gone or does not read, are counted and
    logged, never raised: one peer cannot end the loop that serves the others. Tokens wait for those that the same
    turn of the event loop has for the same gateway: what both ends pay for a message, they pay once a step.
    """

    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str) -> None:
        self._socket = socket  # of a context that closes what is left open; read and written by its plain twin
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._reader = MessageReader(self._plain)
        self.endpoint = endpoint
        self._unsaid: dict[Peer, list[TokenChunk]] = {}
        self.num_malformed = 0
        self.num_undeliverable = 0
        self.num_refused = 0  # connections without a handshake: of peers without a trusted key, or not of our kind
        self._refusal_logged_at = float("-inf")

    @classmethod
    @asynccontextmanager
    async def listening(
        cls, context: zmq.asyncio.Context, endpoint: str, keys: CurveKeys | None
    ) -> AsyncIterator["ControlServer"]:
        """Listen for as long as the block runs, and count who was refused. With keys the socket lives in a context of
        its own, for a context has one authenticator."""
        async with AsyncExitStack() as stack:
            if keys is not None:
                context = await stack.enter_async_context(guarded_context(keys, lambda: None))
            server = cls.bind(context, endpoint, keys)
            stack.callback(server.close)
            monitor = server._socket.get_monitor_socket(int(_REFUSED_EVENTS))
            stack.callback(monitor.close, linger=0)
            stack.callback(server._socket.disable_monitor)
            tasks = TaskSet()
            tasks.spawn(server._count_refusals(monitor), name="count refused peers")
            stack.push_async_callback(tasks.close, _CLOSE_TIMEOUT_S)
            yield server

    @classmethod
    def bind(cls, context: zmq.asyncio.Context, endpoint: str, keys: CurveKeys | None = None) -> "ControlServer":
        """Bind a ROUTER; with port 0 the system chooses, and `endpoint` says what. With keys the context must be a
        guarded one."""
        socket = _open_socket(context, zmq.ROUTER, endpoint)
        try:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if keys is not None:
                guard(socket, keys)
            socket.bind(endpoint)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        bound = cast(bytes, socket.getsockopt(zmq.LAST_ENDPOINT))
        return cls(socket, bound.rstrip(b"\0").decode())

    async def recv(self) -> tuple[Peer, ToNode]:
        """Wait for the next readable message and who sent it."""
        while True:
            frames = await self._reader.recv()
            try:
                message = _read(frames[1:])
                if isinstance(message, Ping | PrefillTask | DecodeTask | CancelTask | ProbeLink):
                    return frames[0], message
                raise MessageError(f"a gateway does not say {type(message).__name__}")
            except MessageError as error:
                self.num_malformed += 1
                logger.warning("dropped a message from gateway %s: %s", frames[0].hex(), error)

    async def send(self, peer: Peer, message: ToGateway) -> None:
        """Hand `message` to the socket at once, or drop it when `peer` is gone or has stopped reading."""
        self._say_all(peer)
        self._send(peer, message)

    def say(self, peer: Peer, chunk: TokenChunk) -> None:
        """Let `chunk` leave when this turn of the event loop ends, at the latest before the next message to `peer`.

        Raises:
            MalformedMessage: its prompt has more logprobs than a message takes; nothing else is too long.
        """
        if chunk.prompt_logprobs is not None:
            self._say_all(peer)
            self._send(peer, TokenBatch((chunk,)))
        elif (unsaid := self._unsaid.get(peer)) is not None:
            unsaid.append(chunk)
        else:
            self._unsaid[peer] = [chunk]
            asyncio.get_running_loop().call_soon(self._say_all, peer)

    def close(self) -> None:
        """Close the socket; what is queued gets a moment to leave."""
        for peer in tuple(self._unsaid):
            self._say_all(peer)
        self._reader.close()
        self._socket.close(linger=_LINGER_MS)

    def _say_all(self, peer: Peer) -> None:
        unsaid = self._unsaid.pop(peer, None)
        if unsaid is not None:
            self._send(peer, TokenBatch(tuple(unsaid)))

    def _send(self, peer: Peer, message: ToGateway) -> None:
        try:
            content = encode(message)
            self._plain.send(peer, _DONTWAIT | _SNDMORE)  # refused here, if at all: nothing is ever sent in part
            self._plain.send(content, _DONTWAIT)
        except zmq.Again:
            self._drop(peer, message, "it does not read")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(peer, message, "it is gone")
        finally:
            self._reader.look()

    async def _count_refusals(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = await recv_monitor_message(monitor)
            self.num_refused += 1
            now = time.monotonic()
            if event["event"] == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:  # so ends also a look whether the port is open
                continue
            if now - self._refusal_logged_at > _REFUSAL_LOG_S:  # whoever is refused tries again and again
                self._refusal_logged_at = now
                logger.warning(
                    "a peer was refused at %s (%d so far): %s", self.endpoint, self.num_refused, _PERHAPS_KEYS
                )

    def _drop(self, peer: Peer, message: ToGateway, why: str) -> None:
        self.num_undeliverable += 1
        logger.debug("dropped %s to gateway %s: %s", type(message).__name__, peer.hex(), why)


class ControlClient:
    """The gateway's end of one connection to one node. Its owner runs `watch` for as long as it holds the
    client.
    """

    def __init__(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket, connect_timeout_s: float) -> None:
        self._socket = socket  # of a context that closes what is left open; read and written by its plain twin
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._reader = MessageReader(self._plain)
        self._monitor = monitor
        self._connect_timeout_s = connect_timeout_s
        self.lost = asyncio.Event()
        self.why_lost = "the connection was closed"
        self.was_refused = False  # the node was there, and there was no handshake with it
        self.num_malformed = 0

    @classmethod
    def connect(
        cls,
        context: zmq.asyncio.Context,
        endpoint: str,
        connect_timeout_s: float = 5.0,
        keys: CurveKeys | None = None,
    ) -> "ControlClient":
        """Begin to connect a DEALER; success or failure shows in `watch`.

        Raises:
            ChannelLost: `endpoint` is none.
        """
        socket = _open_socket(context, zmq.DEALER, endpoint)
        try:
            socket.setsockopt(zmq.IDENTITY, secrets.token_bytes(16))
            socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, int(connect_timeout_s * 1000))
            if keys is not None:
                present(socket, keys)
            monitor = socket.get_monitor_socket(int(zmq.Event.HANDSHAKE_SUCCEEDED | _LOST_EVENTS))
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ChannelLost(f"cannot connect to {endpoint!r}: {error}") from error
        return cls(socket, monitor, connect_timeout_s)

    async def watch(self) -> None:
        """Return when the connection is lost, or was not made in time; `lost` is set and `why_lost` says why."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                event = await self._next_event()
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                await self._next_event()
                self.why_lost = "its connection is lost"
            else:
                self.was_refused = event != zmq.Event.CLOSED
                self.why_lost = f"it does not take this end; {_PERHAPS_KEYS}" if self.was_refused else "nobody answers"
        except TimeoutError:
            self.why_lost = f"no connection could be made within {self._connect_timeout_s:g} s"
        finally:
            self.lost.set()

    async def wait_all_read(self) -> None:
        """Once the connection is lost: wait until another task has received what the node said last."""
        await self._reader.wait_all_read()

    def send(self, message: ToNode) -> None:
        """Hand `message` to the socket at once.

        Raises:
            ChannelLost: the connection is lost, or the node has stopped reading.
            MalformedMessage: `message` is more than any node accepts.
        """
        if self.lost.is_set():
            raise ChannelLost(self.why_lost)
        content = encode(message)
        try:
            self._plain.send(content, _DONTWAIT)
        except zmq.Again as error:
            raise ChannelLost("the node does not read") from error
        finally:
            self._reader.look()

    async def follow(self, take: Callable[[ToGateway], bool]) -> None:
        """Give each readable message to `take` the moment it comes, until it returns True. Ends only so: the owner
        cancels it when `lost` is set.

        Raises:
            Exception: whatever `take` raises.
        """

        def read(frames: list[bytes]) -> bool:
            message = self._understood(frames)
            return message is not None and take(message)

        await self._reader.follow(read)

    async def recv(self) -> ToGateway:
        """Wait for the next readable message. Ends only with one: the owner cancels it when `lost` is set."""
        while (message := self._understood(await self._reader.recv())) is None:
            pass
        return message

    def close(self) -> None:
        """Close the socket; what is queued (a cancel) gets a moment to leave, unless the node is lost."""
        linger_ms = 0 if self.lost.is_set() else _LINGER_MS
        self.lost.set()
        self._reader.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    def _understood(self, frames: list[bytes]) -> ToGateway | None:
        """Return the message; None, counted and logged, for what cannot be read."""
        try:
            message = _read(frames)
            if isinstance(message, _TO_GATEWAY):
                return message
            raise MessageError(f"a node does not say {type(message).__name__}")
        except MessageError as error:
            self.num_malformed += 1
            logger.warning("dropped a message from a node: %s", error)
            return None

    async def _next_event(self) -> int:
        event = await recv_monitor_message(self._monitor)
        return int(event["event"])


def _open_socket(context: zmq.asyncio.Context, kind: int, endpoint: str) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    for option, value in (
        (zmq.LINGER, _LINGER_MS),
        (zmq.SNDHWM, _HIGH_WATER_MESSAGES),
        (zmq.RCVHWM, _HIGH_WATER_MESSAGES),
        (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
        (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
        # With IPv6 on, an IPv4 address is reported as a mapped one, which a peer without IPv6 cannot dial.
        (zmq.IPV6, 0 if _IPV4.match(endpoint) else 1),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S),
        (zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_INTERVAL_S),
        (zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_PROBES),
    ):
        socket.setsockopt(option, value)
    return socket


def _read(frames: list[bytes]) -> object:
    if len(frames) != 1:
        raise MessageError(f"{len(frames)} frames in a message of one")
    return decode(frames[0])
