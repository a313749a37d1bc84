"""One workload's comparison: servers started, conditions measured, rounds run in turn, everything saved as it comes.

All servers are up at the same time and only one is asked at a time. What idle ones take is measured and saved; one that
does not rest is held meanwhile, or it would take from whoever is asked.
"""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from comparison import Run
from goodput import Ladder
from ladder import GRID, Trial, goodputs
from peers.catalogue import axes_of, system_of
from results import Results, Tried
from systems import RunningSystem, System, running
from tuning import tuned
from workloads import WORKLOADS, Conditions, ladder_of, measured_prefill_s

from pdserve.cli.errors import CliError
from pdserve.cli.load_client import LoadClient, Target
from pdserve.cli.load_plan import Lengths, closed_loop

# W4 offers these parts of what the slowest system could prefill; --rate offers another.
_SUSTAINABLE_SHARE = 0.5
_OVERLOAD_SHARE = 1.5
_IDLE_LOOK_S = 2.0
_RESTLESS = 0.05  # cores, of a server that nobody asks
_HELD = "held while others are asked"
_TUNING_SEED = 500_000


@dataclass(frozen=True, slots=True)
class Budget:
    """When a comparison has to be over, on the monotonic clock; None: as long as it takes."""

    ends_at: float | None

    def left_s(self) -> float | None:
        """Return what is left."""
        return None if self.ends_at is None else max(0.0, self.ends_at - time.monotonic())

    def part(self, share: float) -> "Budget":
        """Return a budget that ends when `share` of what is left has passed."""
        left = self.left_s()
        return self if left is None else Budget(time.monotonic() + share * left)

    def limits(self, system: System) -> System:
        """Return `system` such that waiting for its start ends with the budget."""
        left = self.left_s()
        return system if left is None else replace(system, start_timeout_s=min(system.start_timeout_s, left))

    def has_room_for(self, seconds: float) -> bool:
        """Return whether something that takes so long would still end in time."""
        left = self.left_s()
        return left is None or seconds <= left


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers, and the client of it."""

    running: RunningSystem
    client: LoadClient

    @property
    def name(self) -> str:
        """The name of the system."""
        return self.running.system.name


async def tune(family: str, workload: str, conditions: Conditions, budget: Budget) -> list[Tried]:
    """Try the settings of a family with a short run each while there is time; return them, the best first."""
    chosen = WORKLOADS[workload]
    asked = replace(conditions, is_quick=True, seed=conditions.seed + _TUNING_SEED)

    async def measure(name: str) -> Tried:
        nonlocal asked
        if budget.left_s() == 0:
            return Tried(name, None, "not tried: the time was over")
        try:
            async with asyncio.timeout(budget.left_s()), serving(budget.limits(system_of(name, workload))) as server:
                if workload == "W4" and not asked.long_rate_per_s:  # the same for all that follow
                    asked = _at_capacity(asked, await measured_prefill_s(server.client, asked.seed))
                value = (await chosen.run(server.client, asked))[chosen.primary]
        except SystemExit as error:
            if isinstance(error.code, int):  # a signal
                raise
            tried = Tried(name, None, str(error)[-300:])
        except TimeoutError:
            tried = Tried(name, None, "the time was over")
        else:
            tried = Tried(name, value)
        print(
            f"tuning {family} for {workload}: {name}: {tried.error or f'{tried.value:.4g} {chosen.primary}'}",
            flush=True,
        )
        return tried

    return await tuned(axes_of(family), measure, is_less_better=chosen.is_less_better)


async def compare(
    results: Results,
    systems: Sequence[System],
    conditions: Conditions,
    num_rounds: int,
    budget: Budget,
    folder: Path | None,
) -> None:
    """Run what is missing of `num_rounds` rounds; `results` holds every run as soon as it has ended.

    A peer that does not start is left out and named, and one that fails in a round from then on. Ends early when no
    further round fits into the budget.

    Raises:
        SystemExit: ours does not start, or fails.
    """
    async with contextlib.AsyncExitStack() as stack:
        servers = await _started(results, [budget.limits(system) for system in systems], stack)
        if results.workload == "W4":
            conditions = await _with_rates(results, servers, conditions)
        idle = results.conditions["idle CPU s/s"] = await _idle_cpu(servers)
        if restless := [name for name, cores in idle.items() if cores >= _RESTLESS]:
            results.conditions[_HELD] = restless
        for number in range(num_rounds):
            began_at = time.monotonic()
            # Other prompts in each round: no server knows a prefix of them.
            own = replace(conditions, seed=conditions.seed + 1_000 * number)
            if results.workload == "W6":
                await climb(results, servers, own, ladder_of(own), number, folder)
            else:
                await _run_each(results, servers, own, number, folder)
            if not budget.has_room_for(time.monotonic() - began_at):
                break


async def _run_each(
    results: Results, servers: list[Server], conditions: Conditions, number: int, folder: Path | None
) -> None:
    for server in tuple(servers):
        if not results.has(server.name, number):
            with _failing(results, servers, server), _others_held(results, servers, server):
                results.runs.append(await _run_once(results.workload, server, conditions, number))
            if folder is not None:
                results.save(folder)


async def climb(
    results: Results, servers: list[Server], conditions: Conditions, ladder: Ladder, number: int, folder: Path | None
) -> None:
    """W6: ask all servers the same rate before the next, each until it keeps no promise at one."""
    first_steps = await _first_steps(results, servers, ladder)
    for step in itertools.count(min(first_steps.values(), default=0)):
        climbing = [server for server in servers if not results.has(server.name, number)]
        if not climbing:
            break
        for server in climbing:
            earlier = results.trials_of(server.name, number)
            is_known = any(trial.rate_per_s == ladder.rate_per_s(step) for trial in earlier)
            if step < first_steps[server.name] or is_known:
                continue
            with _failing(results, servers, server), _others_held(results, servers, server):
                trial = await _asked(server, ladder, step, number)
                results.trials.append(trial)
                if not trial.keeps(ladder.loosest):
                    results.runs += goodputs([*earlier, trial], conditions.objectives)
            if folder is not None:
                results.save(folder)


async def _first_steps(results: Results, servers: list[Server], ladder: Ladder) -> dict[str, int]:
    known = results.conditions.setdefault("first step of the ladder", {})
    assert isinstance(known, dict)
    for server in tuple(servers):
        if server.name not in known:
            with _failing(results, servers, server), _others_held(results, servers, server):
                known[server.name] = await ladder.first_step(server.client)
    return {server.name: known[server.name] for server in servers}


async def _asked(server: Server, ladder: Ladder, step: int, number: int) -> Trial:
    cpu_before = server.running.cpu_s()
    answers = await ladder.ask(server.client, step)
    trial = Trial(server.name, number, ladder.rate_per_s(step), answers, server.running.cpu_s() - cpu_before)
    tightest, *_, widest = GRID.items()
    shares = ", ".join(f"{100 * trial.share_of(one):.0f} % within {name}" for name, one in (tightest, widest))
    print(
        f"W6 round {number}, load {os.getloadavg()[0]:.1f}, {trial.system} at {trial.rate_per_s:.3g} requests/s: "
        f"{shares}, CPU {trial.cpu_s:.1f} s",
        flush=True,
    )
    return trial


async def _started(results: Results, systems: Sequence[System], stack: contextlib.AsyncExitStack) -> list[Server]:
    servers = []
    for index, system in enumerate(systems):
        try:
            servers.append(await stack.enter_async_context(serving(system)))
        except SystemExit as error:
            _leave_out(results, system.name, error, is_ours=index == 0)
    return servers


def _leave_out(results: Results, name: str, error: SystemExit, *, is_ours: bool) -> None:
    """Note why a peer is missing; go on with `error` where it is a signal's, or ours is missing."""
    if is_ours or isinstance(error.code, int):
        raise error
    results.left_out[name] = str(error)[-500:]
    print(f"{name} is left out: {error}", flush=True)


@contextlib.contextmanager
def _failing(results: Results, servers: list[Server], server: Server) -> Iterator[None]:
    """Take `server`, if it fails, out of `servers`."""
    try:
        yield
    except SystemExit as error:
        _leave_out(results, server.name, error, is_ours=server is servers[0])
        servers.remove(server)


@contextlib.contextmanager
def _others_held(results: Results, servers: list[Server], asked: Server) -> Iterator[None]:
    """Hold the servers that would not rest while `asked` is asked."""
    restless = results.conditions.get(_HELD, [])
    assert isinstance(restless, list)
    with contextlib.ExitStack() as stack:
        for server in servers:
            if server is not asked and server.name in restless:
                stack.enter_context(server.running.held())
        yield


@asynccontextmanager
async def serving(system: System) -> AsyncIterator[Server]:
    """Start a server and warm it; nothing of it is left at the end."""
    with running(system) as started:
        async with _client_of(system, started) as client:
            # The longer one fits into the least that a slot of any peer holds in any workload: 512 tokens.
            warm = (*closed_loop(2, Lengths(64, 8), 99), *closed_loop(1, Lengths(384, 8), 98))
            for record in await client.run(warm, concurrency=1):
                if record.error is not None:
                    raise SystemExit(f"{system.name} does not answer: {record.error}")
            yield Server(started, client)


@asynccontextmanager
async def _client_of(system: System, started: RunningSystem) -> AsyncIterator[LoadClient]:
    async with contextlib.AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(LoadClient.open(Target(started.url)))
        except CliError as error:
            raise SystemExit(f"{system.name} does not answer: {error}") from error
        yield client


async def _with_rates(results: Results, servers: list[Server], conditions: Conditions) -> Conditions:
    """Return `conditions` with the rates of long prompts: as measured before, given, or measured now."""
    known = results.conditions.get("long prompts/s")
    if not isinstance(known, list):
        times: dict[str, float] = {}
        for server in tuple(servers):
            with _failing(results, servers, server):
                times[server.name] = await measured_prefill_s(server.client, conditions.seed + 500)
        if not conditions.long_rate_per_s:
            conditions = _at_capacity(conditions, max(times.values()))
        known = [conditions.long_rate_per_s, conditions.overload_rate_per_s]
        results.conditions |= {"long prompt alone s": times, "long prompts/s": known}
    return replace(conditions, long_rate_per_s=known[0], overload_rate_per_s=known[1])


def _at_capacity(conditions: Conditions, prefill_s: float) -> Conditions:
    return replace(
        conditions,
        long_rate_per_s=_SUSTAINABLE_SHARE / prefill_s,
        overload_rate_per_s=_OVERLOAD_SHARE / prefill_s,
    )


async def _idle_cpu(servers: Sequence[Server]) -> dict[str, float]:
    """Return the CPU seconds a second that each server takes while nobody asks it."""
    before = [server.running.cpu_s() for server in servers]
    await asyncio.sleep(_IDLE_LOOK_S)
    return {
        server.name: round((server.running.cpu_s() - spent) / _IDLE_LOOK_S, 3)
        for server, spent in zip(servers, before, strict=True)
    }


async def _run_once(workload: str, server: Server, conditions: Conditions, number: int) -> Run:
    cpu_before = server.running.cpu_s()
    figures = await WORKLOADS[workload].run(server.client, conditions)
    run = Run(server.name, number, figures, server.running.cpu_s() - cpu_before)
    shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    print(
        f"{workload} round {number}, load {os.getloadavg()[0]:.1f}, {run.system}: {shown}, CPU {run.cpu_s:.1f} s",
        flush=True,
    )
    return run
