"""A comparison of real servers, as small as they can be: saved as it goes, resumed, and without what does not start."""

import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pdserve.cli.load_client import LoadClient, Target
from pdserve.cli.load_report import Objectives

Load = Callable[[str], ModuleType]

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
_TRACE = _BENCHMARKS / "data" / "azure_conversation_2023_first2000.csv"
# Answers with as many tokens as were asked for, at once.
_SERVER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from peer_http import serve

def accept(one):
    for token_id in range(one.num_output):
        one.put(token_id)
    one.put(None)

asyncio.run(serve(accept))
"""


def _system(load: Load, name: str, code: str = _SERVER) -> Any:
    command = (sys.executable, "-c", code, str(_BENCHMARKS / "peers"))
    return load("systems").System(name, command, f"settings of {name}", start_timeout_s=60.0)


async def _compare(load: Load, folder: Path, systems: list[Any], num_rounds: int, results: Any = None) -> Any:
    if results is None:
        settings = {system.name: system.settings for system in systems}
        results = load("results").Results("W1", True, 1, settings)
    conditions = load("workloads").Conditions(seed=1, is_quick=True)
    budget = load("rounds").Budget(None)
    await load("rounds").compare(results, systems, conditions, num_rounds, budget, folder)
    return results


@pytest.mark.timeout(180)
async def test_rounds_alternate_are_saved_and_resumed_and_what_fails_is_left_out(load: Load, tmp_path: Path) -> None:
    ours, peer = _system(load, "ours"), _system(load, "peer")
    broken = _system(load, "broken", "raise SystemExit('no such wheel')")

    first = await _compare(load, tmp_path, [ours, peer, broken], 1)

    assert [(run.system, run.round) for run in first.runs] == [("ours", 0), ("peer", 0)]
    assert "no such wheel" in first.left_out["broken"]
    saved = load("results").load_results(tmp_path / "W1.json")
    assert saved.runs == first.runs

    resumed = await _compare(load, tmp_path, [ours, peer], 2, saved)

    assert resumed.runs[:2] == first.runs
    assert [(run.system, run.round) for run in resumed.runs[2:]] == [("ours", 1), ("peer", 1)]
    assert "decode tokens/s" in load("render").render(tmp_path) and (tmp_path / "W1-0.svg").exists()


# Counts in a file how often it turns round while nobody asks it.
_RESTLESS = _SERVER.replace(
    "def accept(one):",
    """
import threading

def spin():
    with open(sys.argv[2], "a", buffering=1) as turns:
        while True:
            sum(range(10_000))
            turns.write(".")

threading.Thread(target=spin, daemon=True).start()

def accept(one):""",
)


@pytest.mark.timeout(300)
async def test_a_server_that_does_not_rest_is_held_while_another_is_asked(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = tmp_path / "turns"
    ours, peer = _system(load, "ours"), _system(load, "peer", _RESTLESS)
    peer = replace(peer, command=(*peer.command, str(turns)))
    rounds, spun = load("rounds"), {}
    run_once = rounds._run_once

    async def watched(workload: str, server: Any, *rest: Any) -> Any:
        before = turns.stat().st_size
        try:
            return await run_once(workload, server, *rest)
        finally:
            spun[server.name] = turns.stat().st_size - before

    monkeypatch.setattr(rounds, "_run_once", watched)

    results = await _compare(load, tmp_path / "results", [ours, peer], 1)

    assert results.conditions["held while others are asked"] == ["peer"]
    assert [run.system for run in results.runs] == ["ours", "peer"], "it goes on when it is asked"
    assert spun["ours"] <= 1 < spun["peer"]  # a turn may end while the signal is on its way


# Ends at its sixth request: three warm it, two are a round of W1.
_DYING = _SERVER.replace(
    "def accept(one):",
    """
import itertools, os
numbers = itertools.count(1)

def accept(one):
    if next(numbers) == 6:
        os._exit(3)""",
)


@pytest.mark.timeout(180)
async def test_a_peer_that_dies_is_left_out_and_the_others_go_on(load: Load, tmp_path: Path) -> None:
    ours, dying, peer = _system(load, "ours"), _system(load, "dying", _DYING), _system(load, "peer")
    mute = _system(load, "mute", "import time; print('serving on http://127.0.0.1:9', flush=True); time.sleep(600)")

    results = await _compare(load, tmp_path, [ours, dying, mute, peer], 3)

    assert [run.round for run in results.runs if run.system == "dying"] == [0]
    for name in ("ours", "peer"):
        assert [run.round for run in results.runs if run.system == name] == [0, 1, 2]
    assert "requests failed" in results.left_out["dying"] and "does not answer" in results.left_out["mute"]
    saved = load("results").load_results(tmp_path / "W1.json")
    assert (saved.left_out, saved.runs) == (results.left_out, results.runs)


@pytest.mark.timeout(180)
async def test_ours_that_dies_ends_the_comparison_with_what_there_is(load: Load, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="requests failed"):
        await _compare(load, tmp_path, [_system(load, "ours", _DYING), _system(load, "peer")], 3)

    saved = load("results").load_results(tmp_path / "W1.json")
    assert [(run.system, run.round) for run in saved.runs] == [("ours", 0), ("peer", 0)]


@pytest.mark.timeout(180)
async def test_a_server_that_dies_has_no_goodput(load: Load) -> None:
    goodput = load("goodput")
    with load("systems").running(_system(load, "dying", _DYING)) as server:
        async with LoadClient.open(Target(server.url)) as client:
            requests = goodput.TraceRequests(_TRACE, 5, 0.0, 8.0, seed=1)
            ladder = goodput.Ladder(requests, 2.0, Objectives(60_000.0, None))
            with pytest.raises(SystemExit, match="no answer after a trial"):
                await ladder.ask(client, 3)


# Fails from its NUMBER-th request on, but for the short ones by which it is known to live.
_TIRED = _SERVER.replace(
    "def accept(one):",
    """
import itertools
numbers = itertools.count(1)

def accept(one):
    if (len(one.prompt), one.num_output) != (16, 4) and next(numbers) >= NUMBER:
        raise RuntimeError("tired")""",
)


@pytest.mark.timeout(180)
async def test_systems_climb_the_same_rates_in_turn_until_they_keep_no_promise(load: Load, tmp_path: Path) -> None:
    rounds, goodput = load("rounds"), load("goodput")
    # Three requests warm a server, five are a trial.
    systems = [_system(load, name, _TIRED.replace("NUMBER", limit)) for name, limit in (("ours", "14"), ("peer", "9"))]
    results = load("results").Results("W6", True, 1, {system.name: system.settings for system in systems})
    results.conditions["first step of the ladder"] = {"ours": 3, "peer": 3}
    ladder = goodput.Ladder(goodput.TraceRequests(_TRACE, 5, 0.0, 8.0, seed=1), 2.0, Objectives(60_000.0, None))
    conditions = load("workloads").Conditions(seed=1, is_quick=True, objectives={"goodput": ladder.loosest})

    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(rounds.serving(system)) for system in systems]
        await rounds.climb(results, servers, conditions, ladder, 0, tmp_path)

    asked = [(trial.system, trial.rate_per_s, trial.keeps(ladder.loosest)) for trial in results.trials]
    assert asked == [
        ("ours", 8.0, True), ("peer", 8.0, True), ("ours", 16.0, True), ("peer", 16.0, False), ("ours", 32.0, False),
    ]  # fmt: skip
    # Between all of them and none the limit of 0.9 is a tenth of the way.
    assert {run.system: run.figures["goodput"] for run in results.runs} == pytest.approx(
        {"ours": 16.0 * 2**0.1, "peer": 8.0 * 2**0.1}
    )
    saved = load("results").load_results(tmp_path / "W6.json")
    assert (saved.trials, saved.runs) == (results.trials, results.runs)
    assert "| 2,000 ms, then 100 ms |" in load("render").render(tmp_path)


def test_a_ladder_that_was_cut_off_is_shown_as_what_it_is(load: Load) -> None:
    results = load("results").Results("W6", True, 1, {"ours": "as it comes"})
    results.trials.append(load("ladder").Trial("ours", 0, 4.0, ((100.0, 10.0),), 0.5))

    shown = load("render").markdown(results)

    assert "the least they can be: ours in round 0" in shown and "| 450 ms, then 15 ms | 4 |" in shown


def test_a_server_without_time_to_start_is_told(load: Load) -> None:
    system = load("rounds").Budget(time.monotonic()).limits(_system(load, "peer"))

    with pytest.raises(SystemExit, match="peer does not serve after 0 s"), load("systems").running(system):
        pass


@pytest.mark.timeout(180)
async def test_interference_and_answers_of_a_server_that_answers_at_once(load: Load) -> None:
    interference, goodput = load("interference"), load("goodput")
    with load("systems").running(_system(load, "ours")) as server:
        async with LoadClient.open(Target(server.url)) as client:
            figures = await interference.measure_interference(client, num_long=2, rate_per_s=2.0, seed=1)
            requests = goodput.TraceRequests(_TRACE, 3, 0.0, 8.0, seed=1)
            ladder = goodput.Ladder(requests, 2.0, Objectives(60_000.0, None))
            first_step = await ladder.first_step(client)
            answers = await ladder.ask(client, 4)

    assert figures["long prompts unanswered"] == 0.0 and figures["streams decoding, mean"] > 0.0
    assert figures["tokens/s, prompts and output"] >= figures["output tokens/s"] > 0.0
    assert len(answers) == 3 and None not in answers
    assert ladder.rate_per_s(first_step) > 0.0


def test_a_budget_bounds_starts_and_has_parts(load: Load) -> None:
    budget = load("rounds").Budget(time.monotonic() + 100.0)
    system = _system(load, "peer")

    assert budget.has_room_for(50.0) and not budget.has_room_for(150.0)
    assert budget.part(0.5).left_s() <= 50.0
    assert load("rounds").Budget(time.monotonic() + 10.0).limits(system).start_timeout_s <= 10.0
    assert load("rounds").Budget(None).limits(system) is system
