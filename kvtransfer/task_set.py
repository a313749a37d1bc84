"""Named tasks with one owner, for objects that live longer than one function."""

import asyncio
import logging
from collections.abc import Coroutine

logger = logging.getLogger(__name__)


class TaskSet:
    """Tasks that end with their owner: `close` cancels and awaits them all. A task that fails is logged at
    once and its error kept for `watch`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._stopped = asyncio.Event()

    def spawn(self, coroutine: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """Start a task that this set owns."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    async def watch(self) -> None:
        """Wait until the set is closed.

        Raises:
            RuntimeError: a task has failed; its error is the cause.
        """
        await self._stopped.wait()
        if self._error is not None:
            raise RuntimeError("a task of the KV plane has failed") from self._error

    async def wait(self, timeout_s: float) -> None:
        """Give the tasks this long to end by themselves."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    async def close(self, timeout_s: float) -> None:
        """Cancel what still runs and wait for its end, at most `timeout_s`."""
        for task in self._tasks:
            task.cancel()
        await self.wait(timeout_s)
        for task in self._tasks:
            logger.error("task %s does not end", task.get_name())
        self._stopped.set()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.error("task %s failed", task.get_name(), exc_info=error)
            if self._error is None:
                self._error = error
            self._stopped.set()
