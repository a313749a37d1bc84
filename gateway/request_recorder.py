"""Write-behind of status changes: streams never wait for Redis, and go on without it."""

import asyncio
import contextlib
import logging
import random
import time
from dataclasses import dataclass, replace
from itertools import islice
from typing import NoReturn

from pdserve.control.errors import RedisUnavailable
from pdserve.control.request_state import RequestFacts, RequestRecord, RequestStatus, StatusChange
from pdserve.control.request_store import RequestStore, Transition

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 2.0
# A short request's changes, and those of others, become one write: a pipeline costs more than what is in it.
_GATHER_S = 0.02
_MAX_WRITTEN = 64  # at once
_READ_AFTER_WRITE_S = 1.0


@dataclass(frozen=True, slots=True)
class RecorderCounts:
    """Status changes: submitted == written + dropped + pending."""

    submitted: int
    written: int
    dropped: int
    pending: int


@dataclass(frozen=True, slots=True)
class _Unwritten:
    before: RequestStatus
    path: tuple[StatusChange, ...]
    facts: RequestFacts
    since: float

    def followed_by(self, later: "_Unwritten") -> "_Unwritten":
        """Join two changes of one request into one write."""
        facts = later.facts.over(self.facts)
        return _Unwritten(self.before, self.path + later.path, facts, self.since)


class RequestRecorder:
    """Owns the changes that are not in Redis yet, one entry a request, oldest first.

    While Redis is away they are kept for `retry_for_s`; what does not fit or waits longer is dropped and
    counted, and the record ends by its TTL.
    """

    def __init__(self, store: RequestStore, max_pending: int = 10_000, retry_for_s: float = 120.0) -> None:
        self._store = store
        self._max_pending = max_pending
        self._retry_for_s = retry_for_s
        self._unwritten: dict[str, _Unwritten] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._round = asyncio.Event()  # of writing; each has its own
        self._num_submitted = 0
        self._num_written = 0
        self._num_dropped = 0

    @property
    def counts(self) -> RecorderCounts:
        """Return what became of every change."""
        num_known = self._num_written + self._num_dropped
        return RecorderCounts(
            self._num_submitted, self._num_written, self._num_dropped, self._num_submitted - num_known
        )

    def record(
        self, request_id: str, before: RequestStatus, path: tuple[StatusChange, ...], facts: RequestFacts
    ) -> None:
        """Take a change in; never waits."""
        self._num_submitted += len(path)
        later = _Unwritten(before, path, facts, time.monotonic())
        earlier = self._unwritten.get(request_id)
        if earlier is None and len(self._unwritten) >= self._max_pending:
            self._drop(later)
            return
        self._unwritten[request_id] = earlier.followed_by(later) if earlier else later
        self._idle.clear()
        self._wake.set()

    async def run(self) -> NoReturn:
        """Write until cancelled."""
        retry_s = _FIRST_RETRY_S
        while True:
            await self._wake.wait()
            await asyncio.sleep(_GATHER_S)
            try:
                await self._write_all()
                retry_s = _FIRST_RETRY_S
            except RedisUnavailable:
                self._drop_old()
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, _LAST_RETRY_S)

    async def get(self, request_id: str) -> RequestRecord | None:
        """Return the record, or None. Who was told of a change here finds it, unless Redis is slow.

        Raises:
            RedisUnavailable: nothing can be read now.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READ_AFTER_WRITE_S):
                while request_id in self._unwritten:
                    await self._round.wait()
        return await self._store.get(request_id)

    async def flush(self, timeout_s: float) -> None:
        """Wait, while `run` runs, until everything is written or dropped; at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("%d status changes are left unwritten", self.counts.pending)

    async def _write_all(self) -> None:
        while self._unwritten:
            oldest = dict(islice(self._unwritten.items(), _MAX_WRITTEN))
            problems = await self._store.transitions(
                [Transition(key, each.before, each.path, each.facts) for key, each in oldest.items()]
            )
            for (request_id, change), problem in zip(oldest.items(), problems, strict=True):
                if problem is not None:
                    logger.warning("its record is left as it is: %s", problem, extra={"request_id": request_id})
                self._settle(request_id, change, problem is not None)
            self._round.set()
            self._round = asyncio.Event()
        self._wake.clear()
        self._idle.set()

    def _settle(self, request_id: str, change: _Unwritten, is_lost: bool) -> None:
        """Count `change` and keep what was recorded for the request while it was written."""
        if is_lost:
            self._num_dropped += len(change.path)
        else:
            self._num_written += len(change.path)
        current = self._unwritten.pop(request_id)
        remaining = current.path[len(change.path) :]
        if remaining:
            before = change.path[-1].status
            self._unwritten[request_id] = replace(current, before=before, path=remaining)

    def _drop_old(self) -> None:
        limit = time.monotonic() - self._retry_for_s
        for request_id in [key for key, change in self._unwritten.items() if change.since < limit]:
            self._drop(self._unwritten.pop(request_id))

    def _drop(self, change: _Unwritten) -> None:
        self._num_dropped += len(change.path)
