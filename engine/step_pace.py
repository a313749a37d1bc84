"""When running streams let others have the cores: as long as each still gets its next token in time. Pure: no clock."""

from pdserve.engine.scheduler import Scheduler

_AIM = 0.8  # of the target: the rest is for noise and for the way of a token to its client


class StepPace:
    """Spaces the steps of streams while engines of other processes compute on the same cores.

    A step reads all weights, however few sequences it has. Fewer of them for the same tokens, each with more
    sequences, leave more of the machine to prompts, whose first tokens wait for it. A sequence that has just arrived,
    and anything that waits for blocks or for a place, is never made to wait for it.
    """

    def __init__(self, target_s: float | None) -> None:
        self._interval_s = None if target_s is None else _AIM * target_s
        self._started_at: float | None = None

    def begin(self, now: float) -> None:
        """A step begins."""
        self._started_at = now

    def left_s(self, now: float) -> float:
        """Return for how long the next step can wait if everything that runs had a token in the last one."""
        if self._interval_s is None or self._started_at is None:
            return 0.0
        return max(0.0, self._started_at + self._interval_s - now)


def is_steady(scheduler: Scheduler) -> bool:
    """Return whether all there is are streams that wait for their next token."""
    return scheduler.num_waiting == 0 and scheduler.num_uncomputed_tokens == scheduler.num_running
