"""Alternating runs of several systems: medians, spread, ratios. Pure: numbers in, numbers out."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """One workload on one system in one round; `cpu_s` is the CPU time of its processes meanwhile."""

    system: str
    round: int
    figures: Mapping[str, float]
    cpu_s: float


def names_in_order(runs: Sequence[Run]) -> list[str]:
    """Return the systems, the one that came first (ours) first."""
    return list(dict.fromkeys(run.system for run in runs))


def values_of(runs: Sequence[Run], system: str, figure: str) -> list[float]:
    """Return a figure of a system by round."""
    return [run.figures[figure] for run in runs if run.system == system and figure in run.figures]


def ratios_of(runs: Sequence[Run], figure: str, peer: str) -> list[float]:
    """Return, for each round that both have run, the first system's figure to the peer's.

    Load that lasts longer than a round meets both sides of a ratio, unlike both medians. Nothing to nothing is 1.
    """
    ours = _by_round(runs, names_in_order(runs)[0], figure)
    theirs = _by_round(runs, peer, figure)
    return [_quotient(ours[number], theirs[number]) for number in sorted(ours.keys() & theirs.keys())]


def ratio_of(runs: Sequence[Run], figure: str, peer: str) -> float | None:
    """Return the median of `ratios_of`; None without a common round."""
    ratios = ratios_of(runs, figure, peer)
    return statistics.median(ratios) if ratios else None


def _by_round(runs: Sequence[Run], system: str, figure: str) -> dict[int, float]:
    return {run.round: run.figures[figure] for run in runs if run.system == system and figure in run.figures}


def _quotient(own: float, other: float) -> float:
    if other == 0:
        return 1.0 if own == 0 else float("inf")
    return own / other
