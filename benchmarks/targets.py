"""What the project wants to reach against its peers, and whether results reach it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from comparison import names_in_order, ratio_of
from results import Results


@dataclass(frozen=True, slots=True)
class Goal:
    """Ours to the peer's figure: at least `ratio`, or at most. `peers` are beginnings of names; the best one counts."""

    workload: str
    figure: str
    peers: tuple[str, ...]
    ratio: float
    is_limit: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal held against results: the ratio to the peer that is hardest to beat."""

    goal: Goal
    peer: str
    ratio: float

    @property
    def is_met(self) -> bool:
        """Whether the ratio is on the right side."""
        return self.ratio <= self.goal.ratio if self.goal.is_limit else self.ratio >= self.goal.ratio


GOALS = (
    Goal("W1", "decode tokens/s", ("llamacpp-q8_0",), 1.2),
    Goal("W2", "prefill 1,024 tokens/s", ("llamacpp",), 2.5),
    Goal("W2", "prefill 4,096 tokens/s", ("llamacpp",), 2.5),
    Goal("W3", "output tokens/s", ("llamacpp-q8_0",), 3.0),
    Goal("W3", "output tokens/s", ("transformers-generate",), 3.0),
    Goal("W4", "ITL p99 ms", ("llamacpp", "vllm"), 0.1, is_limit=True),
    Goal("W4", "ITL p99 ms", ("pdserve-colocated",), 0.5, is_limit=True),
    Goal("W4", "tokens/s, prompts and output", ("pdserve-colocated",), 0.9),
    Goal("W5", "warm TTFT ms", ("llamacpp",), 0.5, is_limit=True),
    Goal("W6", "goodput requests/s", ("pdserve-colocated",), 1.3),
    Goal("W6", "goodput requests/s", ("llamacpp", "vllm", "transformers", "ctranslate2"), 2.0),
    Goal("W6", "goodput requests/s, interactive", ("pdserve-colocated",), 1.3),
    Goal("W6", "goodput requests/s, interactive", ("llamacpp", "vllm", "transformers", "ctranslate2"), 2.0),
)


def verdicts(all_results: Sequence[Results]) -> list[Verdict]:
    """Return what the results say of each goal that they say something of."""
    by_workload: Mapping[str, Results] = {results.workload: results for results in all_results}
    found = []
    for goal in GOALS:
        results = by_workload.get(goal.workload)
        ratios = {} if results is None else _ratios(goal, results)
        if ratios:
            hardest = max(ratios, key=ratios.__getitem__) if goal.is_limit else min(ratios, key=ratios.__getitem__)
            found.append(Verdict(goal, hardest, ratios[hardest]))
    return found


def _ratios(goal: Goal, results: Results) -> dict[str, float]:
    runs = results.in_order(results.runs)
    ours, *names = names_in_order(runs) or [""]
    if ours != results.ours:
        return {}
    ratios = {name: ratio_of(runs, goal.figure, name) for name in names if name.startswith(goal.peers)}
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}
