"""How shared memory changes hands: a descriptor over a Unix socket without a file, for whoever knows the token.

The receiver tells each sender the socket's name and a token of its own in the handshake, so over a connection that is
as authenticated as the payload would be. A sender that can reach the name is in the same network namespace of the same
machine; the kernel vouches for the user at both ends; the token says which connection the memory is for.
"""

import asyncio
import logging
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable
from typing import Self

from pdserve.kvtransfer.frames import RING_TOKEN_BYTES
from pdserve.kvtransfer.shared_ring import RingShape, RingView, SharedRing, UnusableRing

logger = logging.getLogger(__name__)

_TIMEOUT_S = 1.0
_WORDS = struct.Struct(f"<{RING_TOKEN_BYTES}sQQ")  # token, number of slots, bytes of a slot
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_ACCEPTED = b"\x01"
_BACKLOG = 64


class RingDoor:
    """The receiver's socket. `admit` is told the token and the memory, and says whether it was expected."""

    def __init__(self, listener: socket.socket, name: str, admit: Callable[[bytes, RingView], bool]) -> None:
        self.name = name
        self._listener = listener
        self._admit = admit

    @classmethod
    def bind(cls, admit: Callable[[bytes, RingView], bool]) -> Self | None:
        """Listen under a name that cannot be guessed; None where there is no such thing."""
        if sys.platform != "linux":
            return None
        name = f"kvtransfer-ring-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(f"\0{name}")
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            logger.info("no shared memory with peers: %s", error)
            return None
        return cls(listener, name, admit)

    async def run(self) -> None:
        """Take memory in, one caller after the other, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            caller, _ = await loop.sock_accept(self._listener)
            with caller:
                try:
                    await self._take(caller)
                except (OSError, UnusableRing) as error:
                    logger.info("shared memory of a peer was refused: %s", error)

    def close(self) -> None:
        """Take no more callers; `run` must have ended."""
        self._listener.close()

    async def _take(self, caller: socket.socket) -> None:
        _check_user(caller)
        token, view = await asyncio.to_thread(_receive_ring, caller)
        if not self._admit(token, view):
            raise UnusableRing("nobody was told this token")
        caller.sendall(_ACCEPTED)


async def hand_over_ring(name: str, token: bytes, shape: RingShape) -> SharedRing:
    """Make a ring and give its other end to the receiver that listens under `name`.

    Raises:
        UnusableRing: it cannot be reached there, does not take it, or there is no memory.
    """
    return await asyncio.to_thread(_hand_over, name, token, shape)


def _hand_over(name: str, token: bytes, shape: RingShape) -> SharedRing:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.settimeout(_TIMEOUT_S)
            caller.connect(f"\0{name}")
            _check_user(caller)
            ring, descriptor = SharedRing.create(shape)
            try:
                words = _WORDS.pack(token, shape.num_slots, shape.slot_size_bytes)
                socket.send_fds(caller, [words], [descriptor])
            finally:
                os.close(descriptor)
            if caller.recv(1) != _ACCEPTED:
                raise UnusableRing("the receiver does not take it")
            return ring
    except OSError as error:
        raise UnusableRing(str(error)) from error


def _receive_ring(caller: socket.socket) -> tuple[bytes, RingView]:
    caller.settimeout(_TIMEOUT_S)
    words, descriptors, _, _ = socket.recv_fds(caller, _WORDS.size, 1)
    try:
        if len(words) != _WORDS.size or len(descriptors) != 1:
            raise UnusableRing("words that are none of this protocol")
        token, num_slots, slot_size_bytes = _WORDS.unpack(words)
        return token, RingView.open(descriptors[0], RingShape(num_slots, slot_size_bytes))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _check_user(peer: socket.socket) -> None:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise UnusableRing(f"the other end belongs to user {uid}")
