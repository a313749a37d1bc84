"""Reads a ZeroMQ socket in the event loop message by message, and makes a future only where nothing is there yet.

`zmq.asyncio` makes one for each message and asks the socket several times about it, which for the small messages of the
control plane is most of their cost.
"""

import asyncio
from contextlib import suppress

import zmq

_EVENTS, _POLLIN, _DONTWAIT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.DONTWAIT)  # enums are slow to compute with
_BURST_MESSAGES = 8  # read without a look at the event loop: each may be a step of many streams
_LAST_READ_S = 1.0


class MessageReader:
    """The reading end of one socket, for one reader; `close` comes before the socket's own.

    The descriptor of a ZeroMQ socket only says that something has changed, and every call to the socket may take that
    note away: whoever sends by the socket calls `look` after that.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._readable = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptor = socket.fileno()
        self._num_in_burst = 0

    async def recv(self) -> list[bytes]:
        """Wait for the frames of the next message."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._readable.set)
        if self._num_in_burst == _BURST_MESSAGES:
            self._num_in_burst = 0
            await asyncio.sleep(0)
        while True:
            self._readable.clear()
            try:
                frames = self._socket.recv_multipart(_DONTWAIT)
            except zmq.Again:
                self._num_in_burst = 0
                await self._readable.wait()
            else:
                self._num_in_burst += 1
                return frames

    def look(self) -> None:
        """Wake the reader if there is something to read."""
        if not self._readable.is_set() and self._has_message():
            self._readable.set()

    async def wait_all_read(self) -> None:
        """Wait until the reader has read what had arrived when the connection of a DEALER ended.

        A monitor tells of the end at once, past messages that are still queued. Nothing follows them; a reader that
        does not read is waited for no longer than `_LAST_READ_S`.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_READ_S):
                while self._has_message():
                    self._readable.set()
                    await asyncio.sleep(0)
                await asyncio.sleep(0)  # the last one is in the reader's hands, which has its turn before ours

    def close(self) -> None:
        """Look at the socket no more."""
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
            self._loop = None

    def _has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)
