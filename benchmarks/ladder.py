"""W6's ladder: what each system answered at each rate, and the rate up to which that keeps a promise. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from comparison import Run

from pdserve.cli.load_report import Objectives

GOOD_SHARE = 0.9
_GRID_TTFT_MS = (450.0, 1_000.0, 2_000.0)
_GRID_TPOT_MS = (15.0, 25.0, 40.0, 100.0)
GRID: Mapping[str, Objectives] = {
    f"{ttft_ms:,.0f} ms, then {tpot_ms:g} ms": Objectives(ttft_ms, tpot_ms)
    for ttft_ms, tpot_ms in product(_GRID_TTFT_MS, _GRID_TPOT_MS)
}

# TTFT and TPOT in ms, the latter None where all tokens came at once; None: too late for any promise, or failed.
Answer = tuple[float, float | None] | None


@dataclass(frozen=True, slots=True)
class Trial:
    """The requests of one rate on one system in one round; `cpu_s` is the CPU time of its processes meanwhile."""

    system: str
    round: int
    rate_per_s: float
    answers: tuple[Answer, ...]
    cpu_s: float

    @classmethod
    def from_json(cls, saved: dict[str, object]) -> "Trial":
        """Return the trial that `dataclasses.asdict` and JSON have made `saved` of."""
        answers = saved.pop("answers")
        assert isinstance(answers, list)
        return cls(**saved, answers=tuple(None if one is None else (one[0], one[1]) for one in answers))  # type: ignore[arg-type]  # what JSON holds is not known

    def keeps(self, objectives: Objectives) -> bool:
        """Return whether enough of its requests met `objectives`."""
        return self.share_of(objectives) >= GOOD_SHARE

    def share_of(self, objectives: Objectives) -> float:
        """Return the part of its requests that met `objectives`."""
        return sum(_is_good(answer, objectives) for answer in self.answers) / len(self.answers)


def _is_good(answer: Answer, objectives: Objectives) -> bool:
    if answer is None:
        return False
    ttft_ms, tpot_ms = answer
    return (objectives.ttft_ms is None or ttft_ms <= objectives.ttft_ms) and (
        objectives.tpot_ms is None or tpot_ms is None or tpot_ms <= objectives.tpot_ms
    )


def loosest(promises: Iterable[Objectives]) -> Objectives:
    """Return what is broken only where every one of `promises` is."""
    ttfts, tpots = zip(*((one.ttft_ms, one.tpot_ms) for one in promises), strict=True)
    return Objectives(_most(ttfts), _most(tpots))


def _most(limits: Sequence[float | None]) -> float | None:
    return None if None in limits else max(limit for limit in limits if limit is not None)


def goodput_of(trials: Iterable[Trial], objectives: Objectives) -> float:
    """Return the highest rate at which enough requests meet `objectives`; 0.0 if none of those asked does.

    Between the highest rate that keeps them and the next, the share of good requests is taken to fall evenly with the
    logarithm of the rate. If there is no next, the rate is the least that it can be.
    """
    rising = sorted(trials, key=lambda trial: trial.rate_per_s)
    kept = [index for index, trial in enumerate(rising) if trial.keeps(objectives)]
    if not kept:
        return 0.0
    low = rising[kept[-1]]
    if low is rising[-1]:
        return low.rate_per_s
    high = rising[kept[-1] + 1]
    low_share, high_share = low.share_of(objectives), high.share_of(objectives)
    part = (low_share - GOOD_SHARE) / (low_share - high_share)
    return low.rate_per_s * (high.rate_per_s / low.rate_per_s) ** part


def goodputs(trials: Sequence[Trial], promises: Mapping[str, Objectives]) -> list[Run]:
    """Return a run for each system and round: the goodput by promise, and the CPU time of all its rates."""
    places = dict.fromkeys((trial.system, trial.round) for trial in trials)
    runs = []
    for system, number in places:
        own = [trial for trial in trials if (trial.system, trial.round) == (system, number)]
        figures = {name: goodput_of(own, objectives) for name, objectives in promises.items()}
        runs.append(Run(system, number, figures, sum(trial.cpu_s for trial in own)))
    return runs


def cpu_ms_per_request(trials: Sequence[Trial], system: str) -> float:
    """Return the CPU time that a request took a system, the median of its rates."""
    return statistics.median(1e3 * one.cpu_s / len(one.answers) for one in trials if one.system == system)
