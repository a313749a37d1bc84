"""Results as a file, and settings found by trying."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Load = Callable[[str], ModuleType]


def test_saved_results_are_read_as_they_were(load: Load, tmp_path: Path) -> None:
    results, run, tried = load("results"), load("comparison").Run, load("results").Tried
    own = results.Results("W1", True, 7, {"pdserve": "as it comes"}, results.this_machine())
    own.tuning["llamacpp"] = [tried("llamacpp-q8_0", 3.5), tried("llamacpp-f16", None, "no memory")]
    own.conditions["long prompts/s"] = [0.5, 1.5]
    own.runs.append(run("pdserve", 0, {"decode tokens/s": 139.5}, 1.9))

    own.save(tmp_path)

    read = results.load_results(tmp_path / "W1.json")
    assert read == own and read.continues(own)
    assert read.has("pdserve", 0) and not read.has("pdserve", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["W1.json"]


def test_what_goes_on_has_all_that_was_found(load: Load, tmp_path: Path) -> None:
    earlier = load("results").Results("W6", True, 7, {"pdserve": "as it comes"})
    earlier.conditions["first step of the ladder"] = {"pdserve": 3}
    earlier.runs.append(load("comparison").Run("pdserve", 0, {"goodput requests/s": 3.0}, 1.9))
    earlier.trials.append(load("ladder").Trial("pdserve", 1, 2.0, ((120.5, 9.125), (80.0, None), None), 1.5))
    earlier.save(tmp_path)
    later = load("results").Results("W6", True, 7, {"pdserve": "as it comes"})

    later.take_over(load("results").load_results(tmp_path / "W6.json"))

    assert later == earlier and later.trials_of("pdserve", 1) == earlier.trials


def test_other_settings_are_another_comparison(load: Load) -> None:
    results = load("results").Results

    one, other = results("W1", True, 7, {"pdserve": "a"}), results("W1", True, 7, {"pdserve": "b"})

    assert not one.continues(other)


def test_what_was_asked_otherwise_is_another_comparison(load: Load) -> None:
    results = load("results").Results

    one, other = (results("W6", True, 7, {}, asked={"trace": name}) for name in ("a.csv", "b.csv"))

    assert not one.continues(other) and one.continues(one)


def test_a_file_of_another_kind_is_named(load: Load, tmp_path: Path) -> None:
    (tmp_path / "W1.json").write_text("[1]")

    with pytest.raises(SystemExit, match=r"W1\.json is no result"):
        load("results").load_results(tmp_path / "W1.json")


def _measure(load: Load, values: dict[str, float]) -> tuple[list[str], Callable[[str], Any]]:
    asked: list[str] = []

    async def measure(name: str) -> Any:
        asked.append(name)
        tried = load("results").Tried
        return tried(name, values[name]) if name in values else tried(name, None, "does not start")

    return asked, measure


_AXES: Sequence[Sequence[str]] = (["p-a", "p-b"], ["x", "y"], ["z"])


async def test_tuning_keeps_the_best_of_each_line(load: Load) -> None:
    values = {"p-a": 10.0, "p-b": 12.0, "p-b-x": 11.0, "p-b-y": 15.0, "p-b-y-z": 14.0}
    asked, measure = _measure(load, values)

    tried = await load("tuning").tuned(_AXES, measure, is_less_better=False)

    assert asked == ["p-a", "p-b", "p-b-x", "p-b-y", "p-b-y-z"]
    assert [one.name for one in tried] == ["p-b-y", "p-b-y-z", "p-b", "p-b-x", "p-a"]


async def test_tuning_prefers_less_of_a_latency_and_leaves_out_what_fails(load: Load) -> None:
    values = {"p-b": 12.0, "p-b-x": 11.0, "p-b-x-z": 30.0}
    _, measure = _measure(load, values)

    tried = await load("tuning").tuned(_AXES, measure, is_less_better=True)

    assert [one.name for one in tried] == ["p-b-x", "p-b", "p-b-x-z", "p-a", "p-b-y"]
    assert tried[-1].error == "does not start"


async def test_tuning_says_why_nothing_works(load: Load) -> None:
    _, measure = _measure(load, {})

    with pytest.raises(SystemExit, match="none of p-a, p-b works: does not start"):
        await load("tuning").tuned(_AXES, measure, is_less_better=True)
