"""Children: what they print is kept, they end when asked or killed, and never outlive their parent."""

import asyncio
import os
import select
import signal
import subprocess
import sys

import pytest

from pdserve.cli.child_process import ChildProcess, ChildSpec, describe_exit


class Echo:
    """Collects what children print and lets a test wait for a line."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        task = asyncio.get_running_loop().create_task(self._notify(), name="notify")
        self._tasks.add(task)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, line: str) -> None:
        async with asyncio.timeout(50), self._changed:
            await self._changed.wait_for(lambda: line in [text for _, text in self.lines])


@pytest.fixture
async def echo() -> Echo:
    return Echo()


def child(script: str, echo: Echo, **options: int) -> ChildProcess:
    spec = ChildSpec("worker", (sys.executable, "-c", script), dict(os.environ), **options)
    return ChildProcess(spec, echo)


STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True: signal.pause()
"""


async def test_output_and_exit_code_are_kept(echo: Echo) -> None:
    worker = child("import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)", echo)

    assert await worker.run() == 3
    assert sorted(worker.last_lines) == ["one", "two"]
    assert sorted(echo.lines) == [("worker", "one"), ("worker", "two")]
    assert worker.pid is None


async def test_a_nicer_child_is_nicer_than_its_parent(echo: Echo) -> None:
    worker = child("import os; print(os.nice(0))", echo, niceness=3)

    assert await worker.run() == 0
    assert list(worker.last_lines) == [str(min(19, os.nice(0) + 3))]


async def test_quiet_child_is_heard_only_in_its_last_lines(echo: Echo) -> None:
    worker = child("print('one')", echo, is_quiet=True)

    await worker.run()

    assert echo.lines == []
    assert list(worker.last_lines) == ["one"]


async def test_overlong_line_is_cut_instead_of_kept_whole(echo: Echo) -> None:
    worker = child("print('x' * 3_000_000)", echo)

    assert await worker.run() == 0
    assert sum(len(line) for _, line in echo.lines) == 3_000_000
    assert max(len(line) for _, line in echo.lines) < 100_000


async def test_child_ends_when_asked(echo: Echo) -> None:
    worker = child("import signal; print('up', flush=True); signal.pause()", echo)
    async with asyncio.TaskGroup() as tasks:
        life = tasks.create_task(worker.run(), name="worker")
        await echo.wait_for("up")

        assert await worker.stop(timeout_s=50.0)

    assert life.result() == -signal.SIGTERM


async def test_child_that_ignores_the_request_is_killed(echo: Echo) -> None:
    worker = child(STUBBORN, echo)
    async with asyncio.TaskGroup() as tasks:
        life = tasks.create_task(worker.run(), name="worker")
        await echo.wait_for("up")

        assert not await worker.stop(timeout_s=0.1)

    assert life.result() == -signal.SIGKILL


async def test_stop_before_the_start_has_finished_is_not_lost(echo: Echo) -> None:
    worker = child("import signal; signal.pause()", echo)
    async with asyncio.TaskGroup() as tasks:
        life = tasks.create_task(worker.run(), name="worker")
        await asyncio.sleep(0)  # one turn of the loop: the start is under way, there is no process yet

        assert await worker.stop(timeout_s=50.0)

    assert life.result() == -signal.SIGTERM


async def test_cancelled_run_leaves_no_process(echo: Echo) -> None:
    worker = child(STUBBORN, echo)
    life = asyncio.create_task(worker.run(), name="worker")
    await echo.wait_for("up")
    pid = worker.pid
    assert pid is not None

    life.cancel()
    with pytest.raises(asyncio.CancelledError):
        await life

    _wait_gone(pid)


def test_child_dies_with_a_parent_that_was_killed() -> None:
    parent_script = f"""
import asyncio, os, sys
from pdserve.cli.child_process import ChildProcess, ChildSpec
spec = ChildSpec("worker", (sys.executable, "-c", {STUBBORN!r}), dict(os.environ))
worker = ChildProcess(spec, lambda name, line: print(worker.pid, flush=True))
asyncio.run(worker.run())
"""
    parent = subprocess.Popen([sys.executable, "-P", "-c", parent_script], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)

        parent.kill()

    _wait_gone(pid)


def _wait_gone(pid: int) -> None:
    """Return once the process has ended; a zombie has."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([process], [], [], 50.0)[0], f"process {pid} is still there"
    finally:
        os.close(process)


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [(0, "exit code 0"), (7, "exit code 7"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")],
)
def test_exit_codes_in_words(exit_code: int, words: str) -> None:
    assert describe_exit(exit_code) == words
