"""Reads a ZeroMQ socket in the event loop message by message, where the loop hears of them: no task is woken.

`zmq.asyncio` makes a future for each message and asks the socket several times about it, which for the small messages
of the control plane is most of their cost.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq

from pdserve.engine.follower import Follower

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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptor = socket.fileno()
        self._follower: Follower[list[bytes]] | None = None
        self._received: deque[list[bytes]] = deque()  # by a `recv` that was cancelled in the same moment
        self._num_in_burst = 0
        self._is_due = False
        self._next_follow: asyncio.Event | None = None  # awaited by who needs the socket read

    async def follow(self, take: Callable[[list[bytes]], bool]) -> None:
        """Give the frames of each message to `take` the moment they come, until it returns True.

        Raises:
            Exception: whatever `take` raises.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._read)
        follower = self._follower = Follower(take)
        if self._next_follow is not None:
            self._next_follow.set()
        try:
            while self._received and follower.put(self._received[0]):
                self._received.popleft()
            self._read()
            await follower.wait()
        finally:
            self._follower = None

    async def recv(self) -> list[bytes]:
        """Wait for the frames of the next message."""
        if not self._received:
            if self._num_in_burst == _BURST_MESSAGES:
                self._num_in_burst = 0
                await asyncio.sleep(0)
            self._num_in_burst += 1
            await self.follow(self._receive)
        return self._received.popleft()

    def look(self) -> None:
        """Have the loop read soon if there is something to read."""
        if self._follower is not None and not self._is_due and self._has_message():
            self._read_soon()

    async def wait_all_read(self) -> None:
        """Wait until the reader has read what had arrived when the connection of a DEALER ended.

        A monitor tells of the end at once, past messages that are still queued. Nothing follows them; a reader that
        has something to read and does not is waited for no longer than `_LAST_READ_S`, however much it has read.
        """
        while self._has_message():
            self._read()
            if self._follower is not None and not self._follower.has_ended:
                await asyncio.sleep(0)
                continue
            follows = self._next_follow = asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_READ_S):
                    await follows.wait()
            if not follows.is_set():  # both come together where the process was held up
                return
        await asyncio.sleep(0)  # the last one may be in the hands of a task, which has its turn before ours

    def close(self) -> None:
        """Look at the socket no more."""
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
            self._loop = None

    def _receive(self, frames: list[bytes]) -> bool:
        self._received.append(frames)
        return True

    def _read(self) -> None:
        """Give what is there, but let others have their turn while messages pour in."""
        num_read = 0
        while self._has_message():  # asked first, as it takes the note away by which the loop would call again at once
            follower = self._follower
            if follower is None or follower.has_ended:
                return
            if num_read == _BURST_MESSAGES:
                self._read_soon()
                return
            num_read += 1
            try:
                frames = self._socket.recv_multipart(_DONTWAIT)
            except zmq.ZMQError as error:
                follower.fail(error)
            else:
                follower.put(frames)

    def _read_soon(self) -> None:
        if not self._is_due and self._loop is not None:
            self._is_due = True
            self._loop.call_soon(self._read_due)

    def _read_due(self) -> None:
        self._is_due = False
        if self._loop is not None:
            self._read()

    def _has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)
