"""Tables and plots of saved results: WORKLOAD.md and an SVG a figure, and report.md over all workloads of a folder.

.venv/bin/python benchmarks/render.py results
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from comparison import Run, names_in_order, ratios_of, values_of
from ladder import GRID, cpu_ms_per_request, goodputs
from results import Results, Tried, load_results
from targets import verdicts

_COLOURS = ("#3366cc", "#dc7633", "#229954", "#884ea0", "#7f8c8d", "#c0392b")


def render(folder: Path) -> str:
    """Write tables, plots and the report of a folder; return the report."""
    all_results = [load_results(path) for path in sorted(folder.glob("W*.json"))]
    all_results = [results for results in all_results if results.has_figures]
    for results in all_results:
        (folder / f"{results.workload}.md").write_text(markdown(results))
        for index, figure in enumerate(results.runs[0].figures if results.runs else ()):
            (folder / f"{results.workload}-{index}.svg").write_text(svg(results, figure))
    text = report(all_results)
    (folder / "report.md").write_text(text)
    return text


def report(all_results: Sequence[Results]) -> str:
    """Return all tables under one heading, goals first."""
    parts = ["# Comparison\n"]
    if all_results:
        machine = "; ".join(f"{name}: {_listed(value)}" for name, value in all_results[0].machine.items())
        parts.append(f"{machine}\n")
    rows = [
        f"| {one.goal.workload} {one.goal.figure} | {one.peer} | {'<=' if one.goal.is_limit else '>='} "
        f"{one.goal.ratio:g} | {_short(one.ratio)} | {'yes' if one.is_met else 'no'} |"
        for one in verdicts(all_results)
    ]
    if rows:
        parts.append("\n".join(["| ours to | peer | wanted | reached | met |", "|---|---|---|---|---|", *rows]) + "\n")
    return "\n".join([*parts, *(markdown(results) for results in all_results)])


def markdown(results: Results) -> str:
    """Return the table of a comparison: median and range of each figure, and ours as a ratio to each peer."""
    runs = [replace(run, figures={**run.figures, "CPU s": run.cpu_s}) for run in results.in_order(results.runs)]
    kind = ", short runs" if results.is_quick else ""
    lines = []
    if runs:
        num_rounds = len({run.round for run in runs})
        lines += [f"{results.workload}{kind}, {num_rounds} alternating rounds, median (lowest to highest):", ""]
        lines += [*_table(runs, results.ours, _cell), ""]
    if results.trials:
        lines += [*_grid(results), ""]
    asked = {run.system for run in runs} | {trial.system for trial in results.trials}
    names = [name for name in results.settings if name in asked]
    lines += [f"- {name}: {results.settings[name]}" for name in names]
    lines += [f"- {name} was left out: {reason}" for name, reason in results.left_out.items()]
    conditions = {**results.asked, **results.conditions}
    if conditions:
        lines.append(f"- {', '.join(f'{name} {_listed(value)}' for name, value in conditions.items())}")
    for family, tried in results.tuning.items():
        lines += ["", f"Settings tried for {family}, the best first:", "", *_tuning_rows(tried)]
    return "\n".join(lines) + "\n"


def _table(runs: Sequence[Run], ours: str, cell: Callable[[Sequence[float]], str]) -> list[str]:
    names = names_in_order(runs)
    peers = names[1:] if names[0] == ours else []  # without a run of ours, no ratio is of it
    columns = [*names, *(f"{ours} / {peer}" for peer in peers)]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for figure in runs[0].figures:
        cells = [cell(values_of(runs, name, figure)) for name in names]
        cells += [cell(ratios_of(runs, figure, peer)) for peer in peers]
        lines.append(f"| {figure} | {' | '.join(cells)} |")
    return lines


def _grid(results: Results) -> list[str]:
    """Return the goodput by promise, and what has to be known to read it."""
    rates = sorted({trial.rate_per_s for trial in results.trials})
    found = results.in_order(goodputs(results.trials, GRID))
    unfinished = [f"{run.system} in round {run.round}" for run in found if not results.has(run.system, run.round)]
    lines = [
        "Requests a second at which 90 % have their first token within the first time, and each further one within the "
        "second on average, median of the rounds; "
        f"asked were {_short(rates[0])} to {_short(rates[-1])}, and 0 is less than the least:",
        "",
        *_table(found, results.ours, _median),
        "",
    ]
    lines += [f"- ended early, so that its figures are the least they can be: {one}" for one in unfinished]
    for name in names_in_order(found):
        lines.append(
            f"- {name}: {cpu_ms_per_request(results.trials, name):.0f} ms of CPU a request, median of the rates"
        )
    return lines


def _tuning_rows(tried: Sequence[Tried]) -> list[str]:
    return [f"- {one.name}: {one.error if one.value is None else _short(one.value)}" for one in tried]


def _listed(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_listed(inner)}" for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(str(one) for one in value)
    return _short(value) if isinstance(value, float) else str(value)


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{_short(middle)} ({_short(low)} to {_short(high)})"


def _median(values: Sequence[float]) -> str:
    return _short(statistics.median(values)) if values else "-"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def svg(results: Results, figure: str) -> str:
    """Return a bar for each system: its median, a line over its range, a dot for each round."""
    runs = results.in_order(results.runs)
    names = [name for name in names_in_order(runs) if values_of(runs, name, figure)]
    top = max(value for name in names for value in values_of(runs, name, figure)) or 1.0
    width, height, bar = 170 * len(names) + 60, 260, 70
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="20" font-size="14">{results.workload}: {figure}</text>',
    ]
    for index, name in enumerate(names):
        values = values_of(runs, name, figure)
        x = 50 + 170 * index
        ends = [_height(value, top) for value in (statistics.median(values), min(values), max(values))]
        parts += [
            f'<rect x="{x}" y="{ends[0]:.1f}" width="{bar}" height="{220 - ends[0]:.1f}" '
            f'fill="{_COLOURS[index % len(_COLOURS)]}" opacity="0.7"/>',
            f'<line x1="{x + bar / 2}" x2="{x + bar / 2}" y1="{ends[1]:.1f}" y2="{ends[2]:.1f}" stroke="black"/>',
            f'<text x="{x}" y="{ends[2] - 6:.1f}">{_short(statistics.median(values))}</text>',
            f'<text x="{x}" y="{238 + 14 * (index % 2)}">{name}</text>',
        ]
        parts += [f'<circle cx="{x + bar / 2}" cy="{_height(value, top):.1f}" r="2.5"/>' for value in values]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _height(value: float, top: float) -> float:
    return 220 - 170 * value / top


def main() -> None:
    """Render the folder named in argv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what run.py had as --output")
    folder = parser.parse_args().folder
    if not any(folder.glob("W*.json")):
        parser.error(f"{folder} has no results of run.py")
    print(render(folder))


if __name__ == "__main__":
    main()
