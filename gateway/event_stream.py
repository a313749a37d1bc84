"""A server-sent event stream to one client: headers at once, every write with a deadline."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import hdrs, web

from pdserve.gateway.deadline import MovingDeadline
from pdserve.gateway.open_requests import ClientGone
from pdserve.gateway.stream_event import AnyEvent

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_KEEP_ALIVE = b": keep-alive\n\n"
_BEHIND_BYTES = 16 * 2**10  # the low-water mark that asyncio gives a transport: below it nothing waits


class EventStream:
    """Owns the response once it is open. A client that leaves `slow_client_timeout_s` of unread data is
    dropped.

    What is buffered for a client is bounded by the transport's high-water mark (64 KiB) and an event of each choice.
    """

    def __init__(self, request: web.Request, slow_client_timeout_s: float) -> None:
        self._request = request
        self._slow_client_timeout_s = slow_client_timeout_s
        self._response: web.StreamResponse | None = None
        self._is_chunked = True
        self._silence = MovingDeadline(self._break_silence)
        self._max_silence_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether headers have been sent: from here on, errors are events."""
        return self._response is not None

    async def open(self, headers: dict[str, str]) -> None:
        """Send the headers."""
        response = web.StreamResponse(headers={**_HEADERS, **headers})
        try:
            await response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error
        self._response = response
        self._is_chunked = (
            response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"
        )  # HTTP/1.0 ends with the connection

    @contextmanager
    def kept_alive(self, max_silence_s: float) -> Iterator[None]:
        """Send a comment after so long without an event: clients skip it and proxies count it as life."""
        self._max_silence_s = max_silence_s
        self._silence.set(max_silence_s)
        try:
            yield
        finally:
            self._max_silence_s = None
            self._silence.close()

    async def send(self, *events: AnyEvent) -> None:
        """Send events in one write, and wait for a client that is behind."""
        if self.write(*events):
            await self.caught_up()

    def write(self, *events: AnyEvent) -> bool:
        """Send events in one write; return whether so much is unread that `caught_up` must be awaited before the next.

        Raises:
            ClientGone: there is nobody to write to.
        """
        if not events:
            return False
        if self._max_silence_s is not None:
            self._silence.set(self._max_silence_s)
        is_one = len(events) == 1
        return self._write(events[0].encoded() if is_one else b"".join([event.encoded() for event in events]))

    async def caught_up(self) -> None:
        """Wait until what is unread is less than what a transport may hold.

        Raises:
            ClientGone: that takes longer than a client may, or it has left.
        """
        try:
            async with asyncio.timeout(self._slow_client_timeout_s):
                await self._request.writer.drain()
        except (TimeoutError, ConnectionError) as error:
            raise ClientGone from error

    async def close(self) -> web.StreamResponse:
        """End the body and return the response."""
        assert self._response is not None
        try:
            async with asyncio.timeout(self._slow_client_timeout_s):
                await self._response.write_eof()
        except (TimeoutError, ConnectionError):
            self.abort()
        return self._response

    def abort(self) -> web.StreamResponse:
        """Cut the connection and return the response."""
        assert self._response is not None
        if (transport := self._request.transport) is not None:
            transport.abort()
        return self._response

    def _write(self, content: bytes) -> bool:
        """Write past aiohttp's writer, which costs as much again as the socket; return whether the client is behind."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ClientGone
        transport.write(b"%x\r\n%b\r\n" % (len(content), content) if self._is_chunked else content)
        return transport.get_write_buffer_size() >= _BEHIND_BYTES

    def _break_silence(self) -> None:
        transport = self._request.transport
        if self._max_silence_s is None or transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() < _BEHIND_BYTES:  # who leaves as much unread has no need of a comment
            self._write(_KEEP_ALIVE)
        self._silence.set(self._max_silence_s)
