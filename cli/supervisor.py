"""Keeps the children of `pdserve serve` running: restarts with growing pauses, an ordered stop by deadline.

Knows processes and exit codes; what they are for is `serve.py`'s.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.cli.child_process import ChildProcess, describe_exit
from pdserve.cli.errors import ChildFailed
from pdserve.cli.progress import ProgressPrinter


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a child may fail: more than `max_restarts` within `window_s` ends everything."""

    max_restarts: int = 5
    window_s: float = 60.0
    first_pause_s: float = 0.5
    max_pause_s: float = 8.0

    def pause_s(self, num_restarts: int) -> float:
        """Return the pause before the restart that follows `num_restarts` recent ones."""
        return float(min(self.first_pause_s * 2**num_restarts, self.max_pause_s))


class RestartBudget:
    """Counts the restarts of one child within the policy's window; pure, `now` comes in."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._restarted_at: deque[float] = deque()

    def take(self, now: float) -> float | None:
        """Return the pause before the next restart and count it; None if there were too many."""
        while self._restarted_at and now - self._restarted_at[0] > self._policy.window_s:
            self._restarted_at.popleft()
        if len(self._restarted_at) >= self._policy.max_restarts:
            return None
        pause_s = self._policy.pause_s(len(self._restarted_at))
        self._restarted_at.append(now)
        return pause_s


class Supervisor:
    """Owns the running children. Everything ends when `stop` is set, by a person or by a failure."""

    def __init__(self, printer: ProgressPrinter, stop: asyncio.Event, policy: RestartPolicy) -> None:
        self.failure: ChildFailed | None = None
        self._printer = printer
        self._stop = stop
        self._policy = policy
        self._may_restart = False

    def allow_restarts(self) -> None:
        """From now on a child that ends is started again; before, it ends everything."""
        self._may_restart = True

    def fail(self, failure: ChildFailed) -> None:
        """End everything because of `failure`; the first one counts."""
        if self.failure is None:
            self.failure = failure
        self._stop.set()

    async def keep_running(self, child: ChildProcess) -> None:
        """Run `child` until everything stops, again and again as the policy allows."""
        budget = RestartBudget(self._policy)
        while not self._stop.is_set():
            exit_code = await child.run()
            if self._stop.is_set():
                return
            what = f"{child.spec.name} ended ({describe_exit(exit_code)})"
            story = "\n".join([f"{what}; its last lines:", *(f"    {line}" for line in child.last_lines)])
            if not self._may_restart:
                self.fail(ChildFailed(f"{story}\nnothing was served yet, so everything stops"))
                return
            pause_s = budget.take(time.monotonic())
            if pause_s is None:
                limit = f"{self._policy.max_restarts} restarts within {self._policy.window_s:.0f} s"
                self.fail(ChildFailed(f"{story}\nit has had {limit}, so everything stops"))
                return
            self._printer.say(f"{story}\nstarting {child.spec.name} again in {pause_s:g} s")
            await self.is_stopped_within(pause_s)

    async def is_stopped_within(self, timeout_s: float) -> bool:
        """Wait until everything stops, at most `timeout_s`; return whether it does."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._stop.wait()
        except TimeoutError:
            return False
        return True

    async def stop_in_order(self, stages: Sequence[tuple[Sequence[ChildProcess], float]]) -> None:
        """Stop one stage after another, each within its seconds; what does not end by itself is killed."""
        for children, timeout_s in stages:
            ended = await asyncio.gather(*(child.stop(timeout_s) for child in children))
            for child, has_ended in zip(children, ended, strict=True):
                if not has_ended:
                    self._printer.say(f"{child.spec.name} did not end within {timeout_s:g} s and was killed")
