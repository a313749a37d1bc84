"""Prompts through one engine: so many at a time, each handed out when it is finished. Knows no tokenizer."""

import signal
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tqdm.auto import tqdm

from pdserve.engine.engine import Engine
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.prompt_run import PromptRun


@dataclass(frozen=True, slots=True)
class Ended:
    """A prompt whose completions are all there, or the mistake of its request that ended it."""

    run: PromptRun
    error: InvalidRequest | None = None


class Interruption:
    """Whether the user has asked to stop: with Ctrl-C, once."""

    def __init__(self) -> None:
        self.is_asked = False

    @classmethod
    @contextmanager
    def watched(cls) -> Iterator["Interruption"]:
        """Take Ctrl-C as a wish until the end of the block; a second one raises KeyboardInterrupt as usual.

        A step is not torn apart. Outside the main thread, and where somebody handles SIGINT, nothing is taken over.
        """
        interruption = cls()
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield interruption
            return

        def ask(number: int, frame: FrameType | None) -> None:
            interruption.is_asked = True
            signal.signal(signal.SIGINT, signal.default_int_handler)

        signal.signal(signal.SIGINT, ask)
        try:
            yield interruption
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def run_prompts(
    engine: Engine, runs: Iterable[PromptRun], interruption: Interruption, max_pending: int | None = None
) -> Generator[Ended, None, None]:
    """Yield each prompt as it ends; at most `max_pending` are in the engine at a time, and none is at the end.

    After an interruption nothing more is yielded; what has come of unfinished prompts is in their runs.
    """
    waiting, pending = iter(runs), dict[str, PromptRun]()
    is_exhausted = False
    try:
        while not interruption.is_asked:
            while not is_exhausted and (max_pending is None or len(pending) < max_pending):
                run = next(waiting, None)
                is_exhausted = run is None
                if run is not None:
                    engine.add_branches([branch.spec for branch in run.branches])
                    pending[run.request_id] = run
            if not pending:
                return
            yield from _step(engine, pending)
    finally:
        for run in pending.values():
            _abort(engine, run)


def _step(engine: Engine, pending: dict[str, PromptRun]) -> Iterator[Ended]:
    by_id = {branch.spec.seq_id: (run, branch) for run in pending.values() for branch in run.branches}
    for output in engine.step():
        run, branch = by_id[output.seq_id]
        if branch.is_finished or run.request_id not in pending:
            continue
        try:
            is_over = branch.take(output)
        except InvalidRequest as error:
            _abort(engine, pending.pop(run.request_id))
            yield Ended(run, error)
            continue
        if is_over:
            engine.scheduler.abort(output.seq_id)
        if run.is_finished:
            del pending[run.request_id]
            yield Ended(run)


def _abort(engine: Engine, run: PromptRun) -> None:
    for branch in run.branches:
        engine.scheduler.abort(branch.spec.seq_id)


class Progress:
    """A bar of finished prompts that says how many tokens a second went in and came out."""

    def __init__(self, total: int | None, use_tqdm: bool | Any) -> None:
        make = tqdm if isinstance(use_tqdm, bool) else use_tqdm
        self._bar = make(total=total, desc="Processed prompts", unit="prompt", disable=not use_tqdm, dynamic_ncols=True)
        self._started_at = time.monotonic()
        self._num_in = self._num_out = 0

    def add(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count a finished prompt."""
        self._num_in += num_prompt_tokens
        self._num_out += num_output_tokens
        seconds = max(time.monotonic() - self._started_at, 1e-6)
        rates = f"in {self._num_in / seconds:.1f}, out {self._num_out / seconds:.1f} tokens/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
