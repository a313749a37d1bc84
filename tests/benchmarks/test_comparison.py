"""The arithmetic, the goals and the rendering of comparisons."""

import xml.etree.ElementTree
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

Load = Callable[[str], ModuleType]


def _results(load: Load, workload: str, figure: str, values: dict[str, list[float]]) -> Any:
    run, results = load("comparison").Run, load("results").Results
    runs = [
        run(name, number, {figure: column[number]}, 2.0)
        for number in range(max(map(len, values.values())))
        for name, column in values.items()
        if number < len(column)
    ]
    return results(workload, False, 1, {name: f"settings of {name}" for name in values}, runs=runs)


def test_a_ratio_is_of_the_same_round(load: Load) -> None:
    # The second round was slow for both: medians over all rounds would say 60 / 40.
    runs = _results(load, "W1", "tokens/s", {"ours": [100.0, 20.0, 60.0], "peer": [50.0, 10.0, 40.0]}).runs

    assert load("comparison").ratio_of(runs, "tokens/s", "peer") == 2.0


def test_a_round_that_was_cut_off_counts_for_those_that_ran(load: Load) -> None:
    runs = _results(load, "W1", "tokens/s", {"ours": [100.0, 20.0], "peer": [50.0]}).runs

    assert load("comparison").ratios_of(runs, "tokens/s", "peer") == [2.0]
    assert load("comparison").values_of(runs, "ours", "tokens/s") == [100.0, 20.0]


def test_the_table_has_medians_ranges_and_settings(load: Load) -> None:
    results = _results(load, "W1", "tokens/s", {"ours": [100.0, 20.0, 60.0], "peer": [50.0, 10.0, 40.0]})

    text = load("render").markdown(results)

    assert "| tokens/s | 60 (20 to 100) | 40 (10 to 50) | 2 (1.5 to 2) |" in text
    assert "| CPU s | 2 (2 to 2) | 2 (2 to 2) | 1 (1 to 1) |" in text
    assert "3 alternating rounds" in text and "- peer: settings of peer" in text


def test_a_plot_has_a_bar_for_each_system_and_a_dot_for_each_round(load: Load) -> None:
    results = _results(load, "W1", "tokens/s", {"ours": [100.0, 20.0], "peer": [50.0, 10.0]})

    drawing = xml.etree.ElementTree.fromstring(load("render").svg(results, "tokens/s"))

    space = "{http://www.w3.org/2000/svg}"
    assert len(drawing.findall(f"{space}circle")) == 4
    assert len(drawing.findall(f"{space}rect")) == 1 + 2


@pytest.mark.parametrize(("ours", "is_met"), [(150.0, False), (250.0, True)])
def test_a_goal_is_held_against_the_peer_that_is_hardest_to_beat(load: Load, ours: float, is_met: bool) -> None:
    figure = "prefill 1,024 tokens/s"
    values = {"pdserve": [ours], "llamacpp-q8_0": [50.0], "llamacpp-f32-unified": [100.0]}

    [verdict] = load("targets").verdicts([_results(load, "W2", figure, values)])

    assert (verdict.peer, verdict.ratio, verdict.is_met) == ("llamacpp-f32-unified", ours / 100, is_met)


def test_a_latency_must_stay_under_its_goal(load: Load) -> None:
    values = {"pdserve": [40.0], "llamacpp-q8_0": [100.0], "llamacpp-q8_0-noram": [50.0]}

    [verdict] = load("targets").verdicts([_results(load, "W5", "warm TTFT ms", values)])

    assert (verdict.peer, verdict.is_met) == ("llamacpp-q8_0-noram", False)


def test_ratios_are_of_ours_whoever_ended_first(load: Load) -> None:
    figure = "goodput requests/s"
    results = _results(load, "W6", figure, {"pdserve": [12.0], "vllm-float32": [4.0], "vllm-bfloat16": [6.0]})
    results.runs.reverse()

    [verdict] = load("targets").verdicts([results])

    assert (verdict.peer, verdict.ratio) == ("vllm-bfloat16", 2.0)
    assert "| | pdserve | vllm-float32 | vllm-bfloat16 | pdserve / vllm-float32 |" in load("render").markdown(results)


def test_without_ours_there_is_no_ratio(load: Load) -> None:
    results = _results(load, "W6", "goodput requests/s", {"pdserve": [], "vllm-float32": [4.0], "llamacpp": [2.0]})

    assert load("targets").verdicts([results]) == []
    assert "| | vllm-float32 | llamacpp |\n" in load("render").markdown(results)


def test_the_report_names_goals_machine_tuning_and_what_was_left_out(load: Load) -> None:
    results = _results(load, "W5", "warm TTFT ms", {"pdserve": [40.0], "llamacpp-q8_0": [100.0]})
    tried = load("results").Tried
    results.machine, results.left_out = {"cores": 2}, {"vllm-float32": "vllm is not installed"}
    results.tuning = {"llamacpp": [tried("llamacpp-q8_0", 100.0), tried("llamacpp-f16", None, "it ended with 1")]}

    text = load("render").report([results])

    assert "cores: 2" in text and "| W5 warm TTFT ms | llamacpp-q8_0 | <= 0.5 | 0.4 | yes |" in text
    assert "- vllm-float32 was left out: vllm is not installed" in text
    assert text.index("- llamacpp-q8_0: 100") < text.index("- llamacpp-f16: it ended with 1")
