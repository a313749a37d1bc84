"""Workloads, ours against peers, A B A B in one run; prints Markdown, saves JSON, tables and plots.

    .venv/bin/python benchmarks/run.py W1 --peer llamacpp-q8_0
    .venv/bin/python benchmarks/run.py W3 --tune llamacpp --peer transformers-generate --output results
    .venv/bin/python benchmarks/run.py W4 --peer pdserve-colocated --peer llamacpp-q8_0-b256 --rounds 3 --output results
    .venv/bin/python benchmarks/run.py all --quick --output results          (20 minutes at most; --budget-minutes)

`all` goes through W1 to W6 against those of its peers that are installed. With --output everything is saved after
each run, also when the command is ended: --resume goes on from there. `render.py DIR` makes the tables again.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import render
from amounts import above_zero
from outputs import output_folder
from peers.catalogue import axes_of, check_name, family_of, is_available, known_names, system_of
from results import Results, load_results, this_machine
from rounds import Budget, compare, tune
from workloads import OBJECTIVES, WORKLOADS, Conditions

from pdserve.cli.errors import SettingError
from pdserve.cli.load_plan import TraceScale, read_trace
from pdserve.cli.load_report import Objectives

_TRACE = Path(__file__).parent / "data" / "azure_conversation_2023_first2000.csv"
# Without --peer: those that the goals are set against, with settings that did well for the workload.
_PEERS = {
    "W1": ("llamacpp-q8_0",),
    "W2": ("llamacpp-q8_0", "llamacpp-f32"),
    "W3": ("llamacpp-q8_0", "transformers-generate"),
    "W4": ("pdserve-colocated", "llamacpp-q8_0-b256"),
    "W5": ("llamacpp-q8_0",),
    "W6": ("pdserve-colocated", "llamacpp-q8_0-b256"),
}
# Parts of the time that a budget gives each of them; what one leaves is for the others.
_SHARES = {"W1": 2.0, "W2": 2.5, "W3": 3.0, "W4": 5.0, "W5": 1.5, "W6": 6.0}
_QUICK_BUDGET_MINUTES = 20.0
_TUNING_PART = 0.5  # of a workload's time, for each family
_SHORTEST = 1e9  # divides lengths until each prompt is one token: a whole trace is read in no time
_ENDING_S = 15.0  # kept for stopping servers and writing tables


def main() -> None:
    """Run argv's comparisons; servers end with it, also on SIGINT and SIGTERM, and what was measured is kept."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    options = checked_options(sys.argv[1:])
    names = _names(options)
    minutes = options.budget_minutes
    if minutes is None and options.workload == "all" and options.quick:
        minutes = _QUICK_BUDGET_MINUTES
    ends_at = None if minutes is None else time.monotonic() + 60 * minutes - _ENDING_S
    failures = []
    try:
        for index, name in enumerate(names):
            failure = _run_workload(name, options, _share(ends_at, names[index:]))
            failures += [failure] if failure else []
    finally:
        if options.output is not None and options.output.exists():
            report = render.render(options.output)
            print(report if options.workload == "all" else f"saved in {options.output}")
    if failures:
        raise SystemExit("\n".join(failures))


def checked_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; what would only fail once its turn has come, which may be hours later, is refused here."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = _names(options)
    try:
        for name in (options.ours, *options.peer, *(axes_of(family)[0][0] for family in options.tune)):
            check_name(name)
        if "W6" in names:
            read_trace(options.trace, sys.maxsize, TraceScale(lengths=_SHORTEST), options.seed)
        if options.resume and options.output is not None:
            for name in names:
                if (path := options.output / f"{name}.json").exists():
                    load_results(path)
    except (SystemExit, SettingError) as error:
        parser.error(str(error))
    if options.resume and options.output is None:
        parser.error("--resume needs the --output of the earlier command")
    return options


def _names(options: argparse.Namespace) -> list[str]:
    return list(WORKLOADS) if options.workload == "all" else [options.workload]


def _share(ends_at: float | None, names: Sequence[str]) -> Budget:
    if ends_at is None:
        return Budget(None)
    left_s = max(0.0, ends_at - time.monotonic())
    return Budget(time.monotonic() + left_s * _SHARES[names[0]] / sum(_SHARES[name] for name in names))


def _run_workload(workload: str, options: argparse.Namespace, budget: Budget) -> str | None:
    """Run one comparison; return what went wrong with it, if anything: the others go on."""
    found: list[Results] = []
    if not budget.has_room_for(0.1):
        return f"{workload}: there was no time for a run"
    try:
        asyncio.run(_within(budget, _compare(workload, options, budget, found)))
    except TimeoutError:
        print(f"{workload}: its time is over", flush=True)
    except SystemExit as error:
        if isinstance(error.code, int):  # a signal, not a failure of this workload
            raise
        return f"{workload}: {error}"
    finally:
        for results in found:
            if results.has_figures:
                print(render.markdown(results), flush=True)
    return None if found and found[0].has_figures else f"{workload}: there was no time for a run"


async def _within(budget: Budget, work: "asyncio.Coroutine[None, None, None]") -> None:
    async with asyncio.timeout(budget.left_s()):
        await work


async def _compare(workload: str, options: argparse.Namespace, budget: Budget, found: list[Results]) -> None:
    conditions = Conditions(
        seed=options.seed,
        is_quick=options.quick,
        long_rate_per_s=options.rate or 0.0,
        overload_rate_per_s=3 * options.rate if options.rate else 0.0,
        trace=options.trace,
        objectives=_objectives(options),
    )
    wanted = options.peer or [name for name in _PEERS[workload] if family_of(name) not in options.tune]
    left_out = {}
    if not options.peer:
        left_out = {name: f"{family_of(name)} is not installed" for name in wanted if not is_available(name)}
        wanted = [name for name in wanted if name not in left_out]
    tuning = {family: await tune(family, workload, conditions, budget.part(_TUNING_PART)) for family in options.tune}
    names = dict.fromkeys([options.ours, *wanted, *(tried[0].name for tried in tuning.values())])
    systems = [system_of(name, workload, tuple(options.ours_option)) for name in names]
    settings = {system.name: system.settings for system in systems}
    asked = _asked(workload, options, conditions)
    results = Results(workload, options.quick, options.seed, settings, this_machine(), asked, {}, tuning, left_out)
    if options.resume and options.output is not None:
        _take_over(results, options.output / f"{workload}.json")
    found.append(results)
    await compare(results, systems, conditions, options.rounds, budget, options.output)


def _asked(workload: str, options: argparse.Namespace, conditions: Conditions) -> Mapping[str, object]:
    if workload == "W4":
        return {} if options.rate is None else {"--rate": options.rate}
    if workload != "W6":
        return {}
    objectives = {name: [one.ttft_ms, one.tpot_ms] for name, one in conditions.objectives.items()}
    return {"trace": options.trace.name, "TTFT and TPOT ms": objectives}


def _objectives(options: argparse.Namespace) -> Mapping[str, Objectives]:
    if options.slo_ttft_ms is None and options.slo_tpot_ms is None:
        return OBJECTIVES
    return {"goodput requests/s": Objectives(options.slo_ttft_ms, options.slo_tpot_ms)}


def _take_over(results: Results, path: Path) -> None:
    """Take the runs of an earlier command that asked the same."""
    if not path.exists():
        return
    earlier = load_results(path)
    if not results.continues(earlier):
        raise SystemExit(f"{path} is of other systems or options: leave --resume out, or name another folder")
    results.take_over(earlier)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=[*WORKLOADS, "all"])
    parser.add_argument("--ours", default="pdserve", help="the system that ratios are of")
    parser.add_argument(
        "--peer", action="append", default=[], help=f"one of {', '.join(known_names())}, with options; repeatable"
    )
    parser.add_argument(
        "--tune",
        action="append",
        default=[],
        metavar="FAMILY",
        help="find a peer's best settings first, and compare with them; repeatable",
    )
    parser.add_argument(
        "--ours-option", action="append", default=[], help="a flag for `pdserve serve`, as --flag=value"
    )
    parser.add_argument("--rounds", type=above_zero(int), default=3)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests")
    parser.add_argument(
        "--budget-minutes",
        type=above_zero(float),
        help="end after so long with what there is; `all --quick`: 20",
    )
    parser.add_argument(
        "--rate", type=above_zero(float), help="W4: long prompts a second, instead of half of the slowest capacity"
    )
    parser.add_argument("--trace", type=Path, default=_TRACE, help="W6: a trace file")
    parser.add_argument(
        "--slo-ttft-ms",
        type=above_zero(float),
        help="W6: a good request has its first token by then; without either, both pairs: 2,000 and 100, 450 and 40",
    )
    parser.add_argument("--slo-tpot-ms", type=above_zero(float), help="W6: and its further ones at this pace")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=output_folder, help="folder for JSON, Markdown and plots")
    parser.add_argument("--resume", action="store_true", help="keep the runs that --output has of the same comparison")
    return parser


if __name__ == "__main__":
    main()
