"""The workloads W1 to W6: what is asked of a server and which figures count. Each works against any server."""

import itertools
import statistics
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from goodput import Ladder, TraceRequests
from interference import LONG_PROMPT, measure_interference
from ladder import GRID, Trial, goodputs, loosest

from pdserve.cli.load_client import LoadClient, StreamRecord
from pdserve.cli.load_plan import Lengths, closed_loop
from pdserve.cli.load_report import LoadReport, Objectives, Spread, report_of, ttft_ms

Figures = Mapping[str, float]


# What W6 promises a user, TTFT and TPOT: an answer that begins and goes on, and one that feels immediate, which are the
# limits of MLPerf Inference 5.0 for Llama 2 70B Interactive (https://mlcommons.org/2025/04/llm-inference-v5).
OBJECTIVES: Mapping[str, Objectives] = {
    "goodput requests/s": Objectives(2_000.0, 100.0),
    "goodput requests/s, interactive": Objectives(450.0, 40.0),
}


@dataclass(frozen=True, slots=True)
class Conditions:
    """What is the same for all systems of a comparison. `is_quick` asks for less of everything.

    `long_rate_per_s` and `overload_rate_per_s` are W4's rates of long prompts; `trace` and `objectives` are W6's.
    """

    seed: int
    is_quick: bool
    long_rate_per_s: float = 0.0
    overload_rate_per_s: float = 0.0
    trace: Path | None = None
    objectives: Mapping[str, Objectives] = field(default_factory=lambda: OBJECTIVES)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run, and the figure by which settings are chosen."""

    run: Callable[[LoadClient, Conditions], Awaitable[Figures]]
    primary: str
    is_less_better: bool = False


async def one_stream(client: LoadClient, conditions: Conditions) -> Figures:
    """W1: one stream, prompt 64, output 128; quick: 64."""
    lengths = Lengths(64, 64 if conditions.is_quick else 128)
    report = await _closed(client, 2 if conditions.is_quick else 5, lengths, 1, conditions)
    tpot, ttft = _spread(report.tpot_ms), _spread(report.ttft_ms)
    return {"decode tokens/s": 1e3 / tpot.p50, "TTFT ms": ttft.p50}


async def prefill(client: LoadClient, conditions: Conditions) -> Figures:
    """W2: prompts of 1,024 and 4,096 tokens, one at a time, one token of output; quick: fewer of them."""
    figures = {}
    for num_prompt in (1_024, 4_096):
        count = (2 if num_prompt == 1_024 else 1) if conditions.is_quick else 3
        report = await _closed(client, count, Lengths(num_prompt, 1), 1, conditions)
        figures[f"prefill {num_prompt:,} tokens/s"] = 1e3 * num_prompt / _spread(report.ttft_ms).p50
    return figures


async def batch(client: LoadClient, conditions: Conditions) -> Figures:
    """W3: 32 requests of 128/128, 16 at once; quick: 16 of 128/64."""
    num_output = 64 if conditions.is_quick else 128
    report = await _closed(client, 16 if conditions.is_quick else 32, Lengths(128, num_output), 16, conditions)
    return {
        "output tokens/s": report.output_tokens_per_s,
        "TTFT p50 ms": _spread(report.ttft_ms).p50,
        "ITL p50 ms": _spread(report.itl_ms).p50,
        "ITL p99 ms": _spread(report.itl_ms).p99,
    }


async def interference(client: LoadClient, conditions: Conditions) -> Figures:
    """W4: 8 streams while 10 prompts of 2,048 tokens come at a rate all can keep, then 12 above it; quick: 4, 5."""
    num_long, num_overload = (4, 5) if conditions.is_quick else (10, 12)
    figures = dict(await measure_interference(client, num_long, conditions.long_rate_per_s, conditions.seed))
    above = await measure_interference(client, num_overload, conditions.overload_rate_per_s, conditions.seed + 1)
    return figures | {f"overload: {name}": value for name, value in above.items()}


async def warm_prefix(client: LoadClient, conditions: Conditions) -> Figures:
    """W5: one prefix of 1,500 tokens; the first request computes it, 16 more come one after the other."""
    plan = closed_loop(5 if conditions.is_quick else 17, Lengths(1_532, 4, shared_prefix=1_500), conditions.seed)
    [first] = _sound(await client.run(plan[:1], concurrency=1))
    later = _sound(await client.run(plan[1:], concurrency=1))
    warm_ms = statistics.median(ttft_ms(record) for record in later)
    return {"first TTFT ms": ttft_ms(first), "warm TTFT ms": warm_ms}


async def goodput(client: LoadClient, conditions: Conditions) -> Figures:
    """W6 of one server alone: the rate at which 90 % of the requests of a scaled trace meet the objectives."""
    ladder, trials = ladder_of(conditions), list[Trial]()
    for step in itertools.count(await ladder.first_step(client)):
        trials.append(Trial("", 0, ladder.rate_per_s(step), await ladder.ask(client, step), 0.0))
        if not trials[-1].keeps(ladder.loosest):
            break
    return goodputs(trials, conditions.objectives)[0].figures


def ladder_of(conditions: Conditions) -> Ladder:
    """Return the rates of W6, each for 30 s and in steps of a third of an octave; quick: 10 s and half an octave.

    The trace keeps its shape; lengths are divided by 8 (CSV) or 64 (JSON lines) and its time is stretched.
    """
    if conditions.trace is None:
        raise SystemExit("W6 needs --trace")
    divisor = 64.0 if conditions.trace.suffix == ".jsonl" else 8.0
    count, span_s, steps_per_octave = (40, 10.0, 2) if conditions.is_quick else (100, 30.0, 3)
    requests = TraceRequests(conditions.trace, count, span_s, divisor, conditions.seed)
    return Ladder(requests, 2.0 ** (1 / steps_per_octave), loosest((*GRID.values(), *conditions.objectives.values())))


async def measured_prefill_s(client: LoadClient, seed: int) -> float:
    """Return how long one of W4's long prompts takes alone, the median of 2: the base of its rate."""
    records = _sound(await client.run(closed_loop(2, Lengths(LONG_PROMPT, 1), seed), concurrency=1))
    return statistics.median(ttft_ms(record) for record in records) / 1e3


WORKLOADS: Mapping[str, Workload] = {
    "W1": Workload(one_stream, "decode tokens/s"),
    "W2": Workload(prefill, "prefill 1,024 tokens/s"),
    "W3": Workload(batch, "output tokens/s"),
    "W4": Workload(interference, "ITL p99 ms", is_less_better=True),
    "W5": Workload(warm_prefix, "warm TTFT ms", is_less_better=True),
    "W6": Workload(goodput, "goodput requests/s"),
}


async def _closed(
    client: LoadClient, count: int, lengths: Lengths, concurrency: int, conditions: Conditions
) -> LoadReport:
    records = await client.run(closed_loop(count, lengths, conditions.seed), concurrency)
    return report_of(_sound(records), Objectives())


def _sound(records: list[StreamRecord]) -> list[StreamRecord]:
    """Return the records; a figure over failures would be no figure."""
    errors = [record.error for record in records if record.error is not None]
    if errors:
        raise SystemExit(f"{len(errors)} of {len(records)} requests failed: {errors[0]}")
    return records


def _spread(spread: Spread | None) -> Spread:
    if spread is None:
        raise SystemExit("no latency was measured")
    return spread
