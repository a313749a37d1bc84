"""What a comparison has found so far, as a file: written whole after every run, read again to go on or to render."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from comparison import Run
from ladder import Trial

_SHOWN_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")


@dataclass(frozen=True, slots=True)
class Tried:
    """One setting of a peer that tuning tried: the primary figure, or why there is none."""

    name: str
    value: float | None
    error: str | None = None


@dataclass(slots=True)
class Results:
    """One workload's comparison.

    `asked` is what options asked of all systems alike: trace, objectives, rate; `conditions` is what came of it.
    """

    workload: str
    is_quick: bool
    seed: int
    settings: Mapping[str, str]
    machine: Mapping[str, object] = field(default_factory=dict)
    asked: Mapping[str, object] = field(default_factory=dict)
    conditions: dict[str, object] = field(default_factory=dict)
    tuning: dict[str, list[Tried]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)  # W6

    def continues(self, earlier: "Results") -> bool:
        """Return whether `earlier` asked the same of the same systems, so that its runs count here."""
        own, other = (
            (one.workload, one.is_quick, one.seed, dict(one.settings), dict(one.machine), dict(one.asked))
            for one in (self, earlier)
        )
        return own == other

    def take_over(self, earlier: "Results") -> None:
        """Go on from what `earlier`, which this one continues, has found."""
        self.runs[:], self.trials[:] = earlier.runs, earlier.trials
        self.conditions |= earlier.conditions

    @property
    def has_figures(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.runs or self.trials)

    @property
    def ours(self) -> str:
        """The system that ratios are of."""
        return next(iter(self.settings))

    def in_order(self, runs: Sequence[Run]) -> list[Run]:
        """Return runs ordered by system, ours first, whichever ended first."""
        order = list(self.settings)
        return sorted(runs, key=lambda run: order.index(run.system))

    def has(self, system: str, number: int) -> bool:
        """Return whether the run of `system` in a round is there."""
        return any(run.system == system and run.round == number for run in self.runs)

    def trials_of(self, system: str, number: int) -> list[Trial]:
        """Return what `system` was asked in a round, the last rate last."""
        return [trial for trial in self.trials if (trial.system, trial.round) == (system, number)]

    def save(self, folder: Path) -> None:
        """Write WORKLOAD.json; a reader sees the old content or the new."""
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f".{self.workload}.json.part"
        made.write_text(json.dumps(asdict(self), indent=1) + "\n")
        made.replace(folder / f"{self.workload}.json")


def load_results(path: Path) -> Results:
    """Read what `save` wrote.

    Raises:
        SystemExit: it is no such file.
    """
    try:
        saved = json.loads(path.read_text())
        runs = [Run(**run) for run in saved.pop("runs")]
        trials = [Trial.from_json(trial) for trial in saved.pop("trials", [])]
        tuning = {family: [Tried(**one) for one in tried] for family, tried in saved.pop("tuning").items()}
        return Results(**saved, runs=runs, trials=trials, tuning=tuning)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is no result of run.py: {error!r}") from error


def this_machine() -> dict[str, object]:
    """Return what a reader needs to know of the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    found = {name.strip(): value.strip() for name, value in told.items()}
    flags = found.get("flags", "").split()
    return {
        "processor": found.get("model name") or platform.processor() or platform.machine(),
        "features": [name for name in _SHOWN_FEATURES if name in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
    }
