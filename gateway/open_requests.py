"""The requests being answered: each ends early when its client leaves or the gateway has drained."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from enum import StrEnum

from aiohttp import web

from pdserve.gateway.errors import AdmissionRefused, GenerationFailed

_CLIENT_CHECK_S = 0.2
_ENDING_S = 1.0


class ClientGone(Exception):
    """The client closed the connection, or left its stream unread: there is nobody to answer."""


class _Ending(StrEnum):
    CLIENT_GONE = "client gone"
    DRAINED = "drained"
    CANCELLED = "cancelled"


class OpenRequests:
    """Owns the set of open scopes; a draining gateway opens no more."""

    def __init__(self) -> None:
        self._scopes: set[OpenRequest] = set()
        self._closed = asyncio.Event()
        self._closed.set()
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._scopes)

    @asynccontextmanager
    async def scope(self, request: web.Request | None) -> AsyncIterator["OpenRequest"]:
        """Run the body for `request`, at most until its client leaves, it is cancelled or the gateway has drained.

        Without a `request` nobody waits who could leave.

        Raises:
            AdmissionRefused: the gateway is draining.
            ClientGone: the client left.
            GenerationFailed: it was cancelled, or the time for draining is over.
        """
        if self.is_draining:
            raise AdmissionRefused("draining", "this gateway is shutting down", 1.0)
        scope = OpenRequest(request)
        self._scopes.add(scope)
        self._closed.clear()
        try:
            async with scope.timeout:
                scope.watch()
                try:
                    yield scope
                finally:
                    scope.unwatch()
        except TimeoutError:
            if not scope.timeout.expired():
                raise
            if scope.ending is _Ending.CLIENT_GONE:
                raise ClientGone from None
            if scope.ending is _Ending.CANCELLED:
                raise GenerationFailed("cancelled", "the request was cancelled", False) from None
            raise GenerationFailed("draining", "the gateway shut down before the answer was complete", True) from None
        finally:
            self._scopes.discard(scope)
            scope.closed.set()
            if not self._scopes:
                self._closed.set()

    async def drain(self, grace_s: float) -> None:
        """Open no more requests, wait for the open ones up to `grace_s`, then end the rest with an error."""
        self.is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._closed.wait()
        except TimeoutError:
            self.end_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(_ENDING_S):
                    await self._closed.wait()

    def cancel(self, response_id: str) -> "list[OpenRequest]":
        """Tell the open requests that answer under `response_id` to end, and return them; none: there is no such."""
        found = [scope for scope in self._scopes if scope.response_id == response_id]
        for scope in found:
            scope.end(_Ending.CANCELLED)
        return found

    def end_all(self) -> None:
        """End every open scope now, with an error to its client."""
        for scope in list(self._scopes):
            scope.end(_Ending.DRAINED)


class OpenRequest:
    """One body in a timeout that expires when it is told to; `response_id` is set once it has one.

    aiohttp cancels a handler on disconnect only if configured so, and offers nothing to await otherwise: the
    transport is looked at by a timer, which works in both configurations.
    """

    def __init__(self, request: web.Request | None) -> None:
        self.timeout = asyncio.timeout(None)
        self.ending: _Ending | None = None
        self.response_id: str | None = None
        self.closed = asyncio.Event()
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        if self._request is None:
            return
        transport = self._request.transport
        if transport is None or transport.is_closing():
            self.end(_Ending.CLIENT_GONE)
        else:
            self._timer = self._loop.call_later(_CLIENT_CHECK_S, self.watch)

    def unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def end(self, ending: _Ending) -> None:
        if self.ending is None:
            self.ending = ending
            self.timeout.reschedule(self._loop.time())
