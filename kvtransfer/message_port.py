"""The messages of one ZeroMQ socket in the event loop, without an awaitable for each.

`zmq.asyncio` makes a future, and looks at the socket several times, for every message; here a wake-up takes what there
is. The socket is a plain one: whoever sends or receives by it does so through its port.
"""

import asyncio
from collections.abc import Callable, Sequence

import zmq

_LAST_READ_TURNS = 100  # of the event loop; a `run` that reads needs two of them
_MESSAGES_PER_TURN = 4  # then others have theirs

# As plain numbers, and frame by frame below: pyzmq's own flags are enumerations, and its calls for whole messages ask
# the socket after each frame, together a quarter of what a message costs here.
_DONTWAIT, _SNDMORE, _EVENTS, _POLLIN = int(zmq.DONTWAIT), int(zmq.SNDMORE), int(zmq.EVENTS), int(zmq.POLLIN)


class MessagePort:
    """One socket. Invariant: while `run` waits, no message lies in the socket that it has not been told of.

    The descriptor of a ZeroMQ socket only says that something has changed, and every call to the socket may take that
    note away; so after each of them the socket is asked whether there is something to read.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._readable = asyncio.Event()

    async def run(self, receive: Callable[[list[zmq.Frame]], None]) -> None:
        """Hand over each message as it comes, until cancelled or `receive` raises.

        Raises:
            zmq.ZMQError: the socket is of no use any more.
        """
        loop = asyncio.get_running_loop()
        descriptor = self._socket.fileno()
        loop.add_reader(descriptor, self._readable.set)
        try:
            while True:
                may_be_more = self._take(receive)
                await (asyncio.sleep(0) if may_be_more else self._readable.wait())
        finally:
            loop.remove_reader(descriptor)

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Queue a message without waiting; its memoryviews are not copied.

        Raises:
            zmq.ZMQError: the queue is full or there is no such peer; nothing was sent.
        """
        try:
            num_following = len(frames)
            for frame in frames:
                num_following -= 1
                more = _SNDMORE if num_following else 0
                self._socket.send(frame, _DONTWAIT | more, copy=isinstance(frame, bytes))
        finally:
            if not self._readable.is_set() and self._has_message():
                self._readable.set()

    async def wait_all_read(self) -> None:
        """Wait until `run` has read what had arrived when the connection of a DEALER ended: a monitor tells of the end
        at once, past messages that are still queued. A `run` that does not read is waited for `_LAST_READ_TURNS`."""
        num_turns = 0
        while self._has_message() and num_turns < _LAST_READ_TURNS:
            self._readable.set()
            await asyncio.sleep(0)
            num_turns = num_turns + 1 if self._readable.is_set() else 0

    def _has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def _take(self, receive: Callable[[list[zmq.Frame]], None]) -> bool:
        """Hand over a few messages; return whether there may be more."""
        self._readable.clear()
        for _ in range(_MESSAGES_PER_TURN):
            try:
                frames = [self._socket.recv(_DONTWAIT, copy=False)]
                while frames[-1].more:
                    frames.append(self._socket.recv(_DONTWAIT, copy=False))
            except zmq.Again:
                return False
            receive(frames)
        return True
