"""The ZeroMQ sockets of the KV plane: their options, and sending without waiting."""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import blake2b
from ipaddress import ip_address
from pathlib import Path

import zmq
import zmq.asyncio

from pdserve.kvtransfer.config import ReceiverConfig, SenderConfig
from pdserve.kvtransfer.curve_keys import CurveKeys
from pdserve.kvtransfer.frames import MAX_FRAME_BYTES, MAX_HEADER_BYTES
from pdserve.kvtransfer.layout import KVLayout
from pdserve.kvtransfer.task_set import TaskSet
from pdserve.kvtransfer.zap import ZAP_DOMAIN, KeyAuthenticator

_CLOSE_TIMEOUT_S = 0.5

# Credit bounds the bytes in flight; these bound the small messages to and from a process that does not read.
_DEALER_QUEUE_MESSAGES = 100_000
_ROUTER_QUEUE_MESSAGES = 4_096

# Over loopback TCP, which is no long way to fill. The kernel's own choice grows to some MiB; what waits there falls out
# of the processor's cache and comes back from memory: blocks of 720 KiB took 1.3 times the processor time. Unix sockets
# have a small one of themselves.
_LOCAL_SEND_BUFFER_BYTES = 256 * 1024

_STRANGERS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

# A socket that must not reconnect: with -1, ZeroMQ's own word for never, it would throw away what had arrived when the
# connection ended and was not read yet. By then the socket is long closed.
NEVER_MS = 86_400_000


def open_dealer(
    context: zmq.asyncio.Context, endpoint: str, config: SenderConfig, server_key: str | None
) -> zmq.Socket[bytes]:
    """Open a sender's socket, to be connected to the endpoint; it never reconnects and has a fresh identity."""
    socket = _plain_socket(context, zmq.DEALER)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
    socket.setsockopt(zmq.SNDHWM, _DEALER_QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _DEALER_QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
    if endpoint.startswith("tcp://") and is_local(endpoint):
        socket.setsockopt(zmq.SNDBUF, _LOCAL_SEND_BUFFER_BYTES)
    _watch_peer(socket, config.lease_s)
    if config.curve is not None:
        present(socket, config.curve, server_key)
    return socket


@asynccontextmanager
async def listening(
    context: zmq.asyncio.Context,
    endpoint: str,
    layout: KVLayout,
    config: ReceiverConfig,
    incarnation: str,
    on_stranger: Callable[[], None],
) -> AsyncIterator[tuple[zmq.Socket[bytes], zmq.asyncio.Socket, str]]:
    """Bind a receiver's socket; yield it, the monitor of its lost connections, and its address.

    Sending to a peer that is gone fails, and a peer that sends a frame larger than a header or a block is
    disconnected. With keys the socket lives in a context of its own, for a context has one authenticator, and the
    monitor tells as well of those who come without one: the authenticator is asked about well-made keys only.

    Raises:
        ValueError: the endpoint is open to other machines and there are no keys.
    """
    check_endpoint(endpoint, config.curve, config.allow_plaintext)
    async with AsyncExitStack() as stack:
        if config.curve is not None:
            context = await stack.enter_async_context(guarded_context(config.curve, on_stranger))
        socket = _open_router(context, endpoint, layout, config)
        stack.callback(socket.close, linger=round(config.linger_s * 1000))
        monitor = open_monitor(context, socket, zmq.EVENT_DISCONNECTED | (0 if config.curve is None else _STRANGERS))
        stack.callback(monitor.close, linger=0)
        stack.callback(socket.disable_monitor)
        socket.bind(endpoint)
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        shortcut = shortcut_to(address, incarnation)
        if shortcut is not None:
            socket.bind(shortcut)
        yield socket, monitor, address


def shortcut_to(endpoint: str, incarnation: str) -> str | None:
    """Return the Unix socket by which a receiver on loopback TCP is reached as well; None where there cannot be one.

    Measured with 3.6 MB frames it carries 1.3 to 1.6 times what loopback TCP does. Its name is abstract: there is no
    file, and it ends with its process however that ends.
    """
    if sys.platform != "linux" or not endpoint.startswith("tcp://") or not is_local(endpoint):
        return None
    port = endpoint.rpartition(":")[2]
    return f"ipc://@kvtransfer-{port}-{blake2b(incarnation.encode(), digest_size=12).hexdigest()}"


def fastest_way(endpoint: str, incarnation: str) -> str:
    """Return the shortcut to a receiver if it is there, in this network namespace, else its endpoint."""
    shortcut = shortcut_to(endpoint, incarnation)
    if shortcut is None:
        return endpoint
    return shortcut if is_abstract_socket(shortcut.removeprefix("ipc://@")) else endpoint


def is_abstract_socket(name: str) -> bool:
    """Whether there is a Unix socket of this name without a file, in this network namespace of this machine."""
    try:
        return any(line.split()[-1] == f"@{name}" for line in Path("/proc/net/unix").read_text().splitlines())
    except OSError:
        return False


def check_endpoint(endpoint: str, keys: CurveKeys | None, allow_plaintext: bool) -> None:
    """Check that what is bound in the clear is for this machine only, unless told otherwise.

    Raises:
        ValueError: it is not.
    """
    if keys is None and not allow_plaintext and not is_local(endpoint):
        raise ValueError(f"{endpoint} is open to other machines: give CURVE keys, or allow_plaintext to do without")


def is_local(endpoint: str) -> bool:
    """Whether only this machine can connect to an endpoint."""
    transport, _, address = endpoint.partition("://")
    if transport != "tcp":
        return transport in ("ipc", "inproc")
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


@asynccontextmanager
async def guarded_context(keys: CurveKeys, on_stranger: Callable[[], None]) -> AsyncIterator[zmq.asyncio.Context]:
    """A context whose servers (see `guard`) are open to holders of trusted keys only."""
    context = zmq.asyncio.Context()
    authenticator = KeyAuthenticator(context, keys, on_stranger)
    tasks = TaskSet()
    authenticator.bind()
    try:
        tasks.spawn(authenticator.run(), name="kv-authenticator")
        yield context
    finally:
        await tasks.close(_CLOSE_TIMEOUT_S)
        authenticator.close()
        await asyncio.to_thread(context.term)


def guard(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, keys: CurveKeys) -> None:
    """Make a socket of a guarded context, not bound yet, ask for keys."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret_key)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)


def present(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, keys: CurveKeys, server_key: str | None = None) -> None:
    """Make a socket, not connected yet, show its key to a guarded one; by default both ends share the pair."""
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public_key)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret_key)
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_key or keys.public_key)


def open_monitor(context: zmq.asyncio.Context, socket: zmq.Socket[bytes], events: int) -> zmq.asyncio.Socket:
    """Open a socket that tells of these events of another; the caller disables the monitor and closes it."""
    address = f"inproc://monitor-{secrets.token_hex(8)}"
    socket.monitor(address, events)
    monitor: zmq.asyncio.Socket = context.socket(zmq.PAIR)
    monitor.connect(address)
    return monitor


def _plain_socket(context: zmq.asyncio.Context, kind: int) -> zmq.Socket[bytes]:
    """Open a socket for a MessagePort in a context whose others are asyncio's."""
    return zmq.Context.shadow(context.underlying).socket(kind)


def _open_router(
    context: zmq.asyncio.Context, endpoint: str, layout: KVLayout, config: ReceiverConfig
) -> zmq.Socket[bytes]:
    socket = _plain_socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.RCVHWM, _ROUTER_QUEUE_MESSAGES)
    socket.setsockopt(zmq.SNDHWM, _ROUTER_QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, max(MAX_HEADER_BYTES, MAX_FRAME_BYTES, layout.block_size_bytes))
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(config.handshake_timeout_s * 1000))
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    _watch_peer(socket, config.lease_s)
    if config.curve is not None:
        guard(socket, config.curve)
    return socket


def _watch_peer(socket: zmq.Socket[bytes], lease_s: float) -> None:
    """Have libzmq end the connection once the peer's process has not answered for a lease. Its threads ask and answer
    by themselves, whatever the interpreters at both ends are busy with."""
    interval_ms = max(1, round(lease_s * 1000 / 3))
    socket.setsockopt(zmq.HEARTBEAT_IVL, interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * interval_ms)


def send_now(socket: zmq.asyncio.Socket, frames: Sequence[bytes | memoryview]) -> None:
    """Queue a message without copying large frames and without waiting.

    Raises:
        zmq.ZMQError: the queue is full or there is no such peer; nothing was sent.
    """
    sent = asyncio.ensure_future(socket.send_multipart(frames, flags=zmq.DONTWAIT, copy=False))
    sent.result()  # with DONTWAIT the future is done when it is returned
