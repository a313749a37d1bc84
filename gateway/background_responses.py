"""Responses generated after their client was answered: a task each, cancelled through Redis from any gateway."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from pdserve.control.errors import RedisUnavailable
from pdserve.control.response_store import ResponseStore, StoredResponse
from pdserve.gateway.error_responses import ErrorReply, error_reply
from pdserve.gateway.errors import AdmissionRefused, GenerationFailed
from pdserve.gateway.first_failure import first_failure

logger = logging.getLogger(__name__)

_MAX_JOBS = 256
_RENEW_S = 2.0


class _CancelAsked(Exception):
    """Somebody cancelled the response."""


@dataclass(frozen=True, slots=True)
class BackgroundJob:
    """One response to generate. `shown` gives the object in a state without an answer, `failed` with an error."""

    response_id: str
    work: Callable[[], Awaitable[StoredResponse]]
    shown: Callable[[str], dict[str, Any]]
    failed: Callable[[ErrorReply], dict[str, Any]]


class BackgroundResponses:
    """Owns the tasks; while `opened`, jobs may be started, and at its end all of them are cancelled.

    Invariant: what is stored as running has an owner key in Redis that its gateway renews; without one it is lost.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Accept jobs while the block runs."""
        async with first_failure(), asyncio.TaskGroup() as group:
            self._group = group
            try:
                yield
            finally:
                self._group = None
                for task in self._tasks:
                    task.cancel()

    async def start(self, job: BackgroundJob) -> dict[str, Any]:
        """Store `job` as queued, begin it, and return its object.

        Raises:
            AdmissionRefused: too many run already.
            RedisUnavailable: it cannot be stored.
        """
        if self._group is None or len(self._tasks) >= _MAX_JOBS:
            raise AdmissionRefused("server_overloaded", "too many responses are generated in the background", 5.0)
        queued = job.shown("queued")
        await self._store.renew(job.response_id)
        await self._store.put(job.response_id, StoredResponse(queued, []))
        task = self._group.create_task(self._run(job), name=f"background-{job.response_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return queued

    async def _run(self, job: BackgroundJob) -> None:
        try:
            stored = await self._outcome(job)
            if stored is not None and not await self._store.put_end(job.response_id, stored):
                too_large = ErrorReply(500, "the answer is too large to be stored", code="answer_too_large")
                await self._store.put_end(job.response_id, StoredResponse(job.failed(too_large), []))
            await self._store.release(job.response_id)
        except RedisUnavailable as error:
            logger.warning("what became of it is not stored: %s", error, extra={"request_id": job.response_id})

    async def _outcome(self, job: BackgroundJob) -> StoredResponse | None:
        """Return what is to be stored, or None if it was cancelled: then that is stored already."""
        try:
            async with first_failure(), asyncio.TaskGroup() as group:
                keeper = group.create_task(self._keep(job.response_id), name=f"owner-{job.response_id}")
                try:
                    await self._store.put_running(job.response_id, StoredResponse(job.shown("in_progress"), []))
                    return await job.work()
                finally:
                    keeper.cancel()
        except _CancelAsked:
            return None
        except Exception as error:
            if isinstance(error, GenerationFailed) and error.code == "cancelled":
                return StoredResponse(job.shown("cancelled"), [])  # as a request, by its id
            return StoredResponse(job.failed(error_reply(error, job.response_id)), [])

    async def _keep(self, response_id: str) -> NoReturn:
        """Renew the ownership until it is cancelled; a Redis that is away for a moment is not the end of the work."""
        while True:
            await asyncio.sleep(_RENEW_S)
            try:
                if not await self._store.renew(response_id):
                    raise _CancelAsked
            except RedisUnavailable as error:
                logger.warning("ownership is not renewed: %s", error, extra={"request_id": response_id})
