"""The attempts of one task on a node: each may be cancelled or end before the others."""

import asyncio


class TaskBranches:
    """Which attempts of a task are still wanted, and what runs for each of them alone."""

    def __init__(self, attempt_ids: tuple[str, ...]) -> None:
        self.attempt_ids = attempt_ids
        self._open: dict[str, asyncio.Task[None] | None] = dict.fromkeys(attempt_ids)

    @property
    def open_ids(self) -> tuple[str, ...]:
        """The attempts that are still wanted, in the order of the task."""
        return tuple(self._open)

    def is_open(self, attempt_id: str) -> bool:
        """Whether the attempt has neither ended nor been cancelled."""
        return attempt_id in self._open

    def follow(self, attempt_id: str, work: asyncio.Task[None]) -> None:
        """Let `work` be cancelled with an open attempt."""
        assert attempt_id in self._open
        self._open[attempt_id] = work

    def end(self, attempt_id: str) -> None:
        """Note that the last word of an attempt is said."""
        self._open.pop(attempt_id, None)

    def cancel(self, attempt_id: str) -> None:
        """Note that an attempt is not wanted any more, and cancel what runs for it."""
        work = self._open.pop(attempt_id, None)
        if work is not None:
            work.cancel()
