"""A comparison of real servers, as small as they can be: saved as it goes, resumed, and without what does not start."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pdserve.cli.load_client import LoadClient, Target
from pdserve.cli.load_report import Objectives

Load = Callable[[str], ModuleType]

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
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
    trace = _BENCHMARKS / "data" / "azure_conversation_2023_first2000.csv"
    with load("systems").running(_system(load, "dying", _DYING)) as server:
        async with LoadClient.open(Target(server.url)) as client:
            requests = goodput.TraceRequests(trace, 5, 0.0, 8.0, seed=1)
            with pytest.raises(SystemExit, match="no answer after a trial"):
                await goodput.measure_goodput(client, requests, Objectives(60_000.0, None), 1.5)


def test_a_server_without_time_to_start_is_told(load: Load) -> None:
    system = load("rounds").Budget(time.monotonic()).limits(_system(load, "peer"))

    with pytest.raises(SystemExit, match="peer does not serve after 0 s"), load("systems").running(system):
        pass


@pytest.mark.timeout(180)
async def test_interference_and_goodput_of_a_server_that_answers_at_once(load: Load) -> None:
    interference, goodput = load("interference"), load("goodput")
    trace = _BENCHMARKS / "data" / "azure_conversation_2023_first2000.csv"
    with load("systems").running(_system(load, "ours")) as server:
        async with LoadClient.open(Target(server.url)) as client:
            figures = await interference.measure_interference(client, num_long=2, rate_per_s=2.0, seed=1)
            requests = goodput.TraceRequests(trace, 3, 0.0, 8.0, seed=1)
            rate = await goodput.measure_goodput(client, requests, Objectives(60_000.0, None), 1.5)

    assert figures["long prompts unanswered"] == 0.0 and figures["streams decoding, mean"] > 0.0
    assert figures["tokens/s, prompts and output"] >= figures["output tokens/s"] > 0.0
    assert rate == 64.0  # the highest that is looked at


def test_a_budget_bounds_starts_and_has_parts(load: Load) -> None:
    budget = load("rounds").Budget(time.monotonic() + 100.0)
    system = _system(load, "peer")

    assert budget.has_room_for(50.0) and not budget.has_room_for(150.0)
    assert budget.part(0.5).left_s() <= 50.0
    assert load("rounds").Budget(time.monotonic() + 10.0).limits(system).start_timeout_s <= 10.0
    assert load("rounds").Budget(None).limits(system) is system
