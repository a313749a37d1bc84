"""Restarts: as many as the policy allows, with growing pauses; then everything ends, with the reason."""

import asyncio
import io
import os
import sys
from collections.abc import Callable

import pytest

from pdserve.cli.child_process import ChildProcess, ChildSpec
from pdserve.cli.progress import ProgressPrinter
from pdserve.cli.supervisor import RestartBudget, RestartPolicy, Supervisor

POLICY = RestartPolicy(max_restarts=2, window_s=60.0, first_pause_s=0.01, max_pause_s=0.02)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
async def stop() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
def printer(stream: io.StringIO) -> ProgressPrinter:
    return ProgressPrinter("text", stream)


def child(echo: Callable[[str, str], None], script: str) -> ChildProcess:
    return ChildProcess(ChildSpec("worker", (sys.executable, "-c", script), dict(os.environ)), echo)


async def test_child_that_ends_before_anything_is_served_ends_everything(
    printer: ProgressPrinter, stop: asyncio.Event
) -> None:
    supervisor = Supervisor(printer, stop, POLICY)

    await supervisor.keep_running(child(printer.echo, "print('no such file'); exit(4)"))

    assert stop.is_set()
    assert "worker ended (exit code 4); its last lines:\n    no such file" in str(supervisor.failure)


async def test_child_is_restarted_as_often_as_allowed(
    printer: ProgressPrinter, stop: asyncio.Event, stream: io.StringIO
) -> None:
    supervisor = Supervisor(printer, stop, POLICY)
    supervisor.allow_restarts()

    await supervisor.keep_running(child(printer.echo, "print('alive'); exit(4)"))

    assert stream.getvalue().count("worker    | alive") == 1 + POLICY.max_restarts
    assert stream.getvalue().count("starting worker again in") == POLICY.max_restarts
    assert stop.is_set()
    assert "it has had 2 restarts within 60 s" in str(supervisor.failure)


async def test_end_that_was_asked_for_is_no_failure(printer: ProgressPrinter, stop: asyncio.Event) -> None:
    supervisor = Supervisor(printer, stop, POLICY)
    sleeper = child(printer.echo, "import signal; signal.pause()")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.keep_running(sleeper), name="keep")
        await asyncio.sleep(0)  # one turn of the loop: the child is being started

        stop.set()
        await supervisor.stop_in_order([((sleeper,), 50.0)])

    assert supervisor.failure is None


async def test_stages_end_one_after_another_and_the_deaf_are_killed(
    printer: ProgressPrinter, stop: asyncio.Event
) -> None:
    supervisor = Supervisor(printer, stop, POLICY)
    heard: list[str] = []
    both_are_up = asyncio.Event()
    ended: list[ChildProcess] = []

    def hear(name: str, line: str) -> None:
        heard.append(line)
        if heard == ["up", "up"]:
            both_are_up.set()

    announce = "print('up', flush=True); signal.pause()"
    deaf = child(hear, f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {announce}")
    polite = child(hear, f"import signal; {announce}")

    async def keep(worker: ChildProcess) -> None:
        await supervisor.keep_running(worker)
        ended.append(worker)

    async with asyncio.TaskGroup() as tasks:
        for worker in (deaf, polite):
            tasks.create_task(keep(worker), name="keep")
        async with asyncio.timeout(50):
            await both_are_up.wait()
        stop.set()
        await supervisor.stop_in_order([((deaf,), 0.5), ((polite,), 50.0)])

    assert ended == [deaf, polite]


def test_pauses_grow_up_to_their_limit() -> None:
    policy = RestartPolicy(max_restarts=5, window_s=60.0, first_pause_s=0.5, max_pause_s=3.0)
    budget = RestartBudget(policy)

    pauses = [budget.take(now=0.0) for _ in range(6)]

    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0, None]


def test_old_restarts_are_forgiven() -> None:
    budget = RestartBudget(POLICY)
    assert [budget.take(now) for now in (0.0, 1.0, 2.0)] == [0.01, 0.02, None]

    assert budget.take(now=60.5) == 0.02
