"""The listening socket and what is answered before there is a request: bytes that are not HTTP."""

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import orjson
from aiohttp import hdrs, web
from aiohttp.http_exceptions import LineTooLong

from pdserve.gateway.config import HttpConfig
from pdserve.gateway.error_responses import ErrorReply
from pdserve.gateway.errors import CannotListen
from pdserve.gateway.first_failure import first_failure
from pdserve.gateway.tls import TlsCertificate

logger = logging.getLogger(__name__)

_CLOSE_S = 1.0
_BACKLOG = 1024
_IDLE_S = 620.0  # between requests: longer than the proxies and load balancers that keep connections for 600 s


@asynccontextmanager
async def listening(app: web.Application, config: HttpConfig, handler_cancellation: bool = True) -> AsyncIterator[str]:
    """Serve `app` on the configured address while the block runs; yield the URL, with the real port.

    Raises:
        CannotListen: the address is taken, or is not one of this machine's.
        InvalidCertificate: the files for HTTPS cannot be used.
    """
    loop = asyncio.get_running_loop()
    certificate = None if config.tls is None else TlsCertificate(config.tls)
    runner = web.AppRunner(app, handler_cancellation=handler_cancellation, access_log=None, shutdown_timeout=_CLOSE_S)
    await runner.setup()
    handlers = runner.server
    assert handlers is not None

    def connected() -> web.RequestHandler:
        return _Connection(handlers, loop, config.read_timeout_s)

    try:
        try:
            server = await loop.create_server(
                connected,
                config.host,
                config.port,
                backlog=_BACKLOG,
                ssl=None if certificate is None else certificate.context,
            )
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise CannotListen(config.host, config.port, reason) from error
        try:
            host = f"[{config.host}]" if ":" in config.host else config.host
            scheme = "http" if certificate is None else "https"
            async with _kept_fresh(certificate):
                yield f"{scheme}://{host}:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _kept_fresh(certificate: TlsCertificate | None) -> AsyncIterator[None]:
    if certificate is None:
        yield
        return
    async with first_failure(), asyncio.TaskGroup() as group:
        keeper = group.create_task(certificate.keep_fresh(), name="certificate")
        try:
            yield
        finally:
            keeper.cancel()


async def check_expectation(request: web.Request) -> web.Response | None:
    """Tell a client that waits before it sends its body to go on; refuse any other expectation."""
    if request.headers[hdrs.EXPECT].lower() != "100-continue":
        message = "the only expectation that this server can meet is 100-continue"
        return _labelled(ErrorReply(HTTPStatus.EXPECTATION_FAILED, message, code="expectation_failed"))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the reply itself has not begun
    return None


def _as_bytes(reply: ErrorReply) -> bytes:
    """Return a last response that needs no request."""
    body = orjson.dumps(reply.body())
    status = HTTPStatus(reply.status)
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nX-Request-Id: {uuid.uuid4().hex}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


class _Connection(web.RequestHandler):
    """aiohttp's protocol, with its own refusals in the same envelope as all others.

    A head must be there `head_timeout_s` after the connection, and later after the first bytes of it. Bodies are left
    as they came: what is decoded here would be decoded in the event loop, whatever it grows to.
    """

    __slots__ = ("_has_begun", "_head_timeout_s", "_head_timer")

    def __init__(self, manager: web.Server, loop: asyncio.AbstractEventLoop, head_timeout_s: float) -> None:
        super().__init__(
            manager,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # None is none, as in aiohttp's own runner
            auto_decompress=False,
            keepalive_timeout=_IDLE_S,
        )
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._has_begun = False  # some bytes of the head that is waited for have come

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first head."""
        super().connection_made(transport)
        self._head_timer = self._loop.call_later(self._head_timeout_s, self._give_up)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Wait no longer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; those that begin a head are waited for to end it."""
        waiter = self._waiter  # pending between requests: aiohttp's loop waits for the next head
        # With TLS the first bytes may come in the same turn as the connection: that loop has not begun yet.
        is_awaited = self._head_timer is not None or (waiter is not None and not waiter.done())
        is_head = is_awaited and bool(data.strip())
        super().data_received(data)
        if not is_head:
            return
        if self._messages:
            self._stop_waiting()
        elif not self._has_begun:
            self._has_begun = True
            if self._head_timer is None:
                self._head_timer = self._loop.call_later(self._head_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        self._has_begun = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        """Close the connection; who has begun a request is told why."""
        if self._has_begun and self.transport is not None:
            reply = ErrorReply(
                HTTPStatus.REQUEST_TIMEOUT, "the head of the request did not come in time", code="header_timeout"
            )
            self.transport.write(_as_bytes(reply))
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to what no handler was asked about, or to what escaped one; it is the last one."""
        if request.writer.output_size > 0:
            raise ConnectionError("part of another response has been sent already")
        response = _labelled(_refusal(status, exc))
        response.force_close()
        return response


def _labelled(reply: ErrorReply) -> web.Response:
    """Return the response to what no middleware sees, with a request id like every other."""
    response = reply.response()
    response.headers["X-Request-Id"] = uuid.uuid4().hex
    return response


def _refusal(status: int, error: BaseException | None) -> ErrorReply:
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("a request failed outside its handler", exc_info=error)
        return ErrorReply(status, "the server failed on this request", code="internal_error")
    logger.debug("refused bytes that are no request: %s", type(error).__name__)
    if isinstance(error, LineTooLong):
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        return ErrorReply(status, "the request line or a header is too long", code="header_too_large")
    return ErrorReply(status, "this is not a well-formed HTTP request", code="invalid_http")
