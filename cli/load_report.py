"""What the records of a load say: latencies, rates, goodput. Pure: numbers in, numbers out."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from pdserve.cli.load_client import StreamRecord


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution, in the unit of its values."""

    p50: float
    p95: float
    p99: float
    max: float
    mean: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """Return the spread of `values`, None if there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p95, p99 = (percentile(ordered, percent) for percent in (50, 95, 99))
        return cls(p50, p95, p99, ordered[-1], statistics.fmean(ordered))


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must keep to count as good, in ms; None is no condition."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of one run. Latencies are of the requests that succeeded.

    TTFT: due to the first token. TPOT: mean time for each further token of a request. ITL: the gap between events that
    carry tokens. `goodput_per_s` counts the requests that succeeded and met all objectives.
    """

    num_requests: int
    num_failed: int
    errors: tuple[str, ...]
    duration_s: float
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    total_ms: Spread | None
    objectives: Objectives
    good_share: float
    goodput_per_s: float

    def as_json(self) -> dict[str, object]:
        """Return plain values."""
        return asdict(self)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the percentile of sorted values, linear between the two neighbours."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def report_of(records: Sequence[StreamRecord], objectives: Objectives) -> LoadReport:
    """Return what `records`, at least one, say together."""
    good = [record for record in records if record.error is None and record.events]
    duration_s = max(record.ended_at for record in records) - min(record.sent_at for record in records)
    cached = [record.usage_cached for record in good if record.usage_cached is not None]
    num_good = sum(_meets(record, objectives) for record in good)
    output_tokens = sum(record.num_output for record in good)
    failures = [record.error or "no token came" for record in records if record.error or not record.events]
    return LoadReport(
        num_requests=len(records),
        num_failed=len(failures),
        errors=tuple(sorted(set(failures))[:5]),
        duration_s=duration_s,
        prompt_tokens=sum(record.num_prompt for record in good),
        cached_tokens=sum(cached) if cached else None,
        output_tokens=output_tokens,
        requests_per_s=_rate(len(good), duration_s),
        output_tokens_per_s=_rate(output_tokens, duration_s),
        ttft_ms=Spread.of(ttft_ms(record) for record in good),
        tpot_ms=Spread.of(tpot for record in good if (tpot := tpot_ms(record)) is not None),
        itl_ms=Spread.of(gap for record in good for gap in gaps_ms(record)),
        total_ms=Spread.of(1e3 * (record.ended_at - record.sent_at) for record in good),
        objectives=objectives,
        good_share=num_good / len(records),
        goodput_per_s=_rate(num_good, duration_s),
    )


def ttft_ms(record: StreamRecord) -> float:
    """Return the time to the first token of a record that has one."""
    return 1e3 * (record.events[0][0] - record.sent_at)


def tpot_ms(record: StreamRecord) -> float | None:
    """Return the mean time of the tokens after the first event; None if all came at once."""
    num_later = record.num_output - record.events[0][1]
    span_s = record.events[-1][0] - record.events[0][0]
    return 1e3 * span_s / num_later if num_later > 0 and len(record.events) > 1 else None


def gaps_ms(record: StreamRecord) -> list[float]:
    """Return the times between events that carried tokens."""
    times = [at for at, _ in record.events]
    return [1e3 * (later - earlier) for earlier, later in pairwise(times)]


def _meets(record: StreamRecord, objectives: Objectives) -> bool:
    tpot = tpot_ms(record)
    return (objectives.ttft_ms is None or ttft_ms(record) <= objectives.ttft_ms) and (
        objectives.tpot_ms is None or tpot is None or tpot <= objectives.tpot_ms
    )


def _rate(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def report_table(report: LoadReport) -> str:
    """Return the report as text for a terminal."""
    lines = [
        f"requests      {report.num_requests}, failed {report.num_failed}, in {report.duration_s:.2f} s",
        f"tokens        {report.prompt_tokens} of prompts, {report.output_tokens} of output",
        f"rate          {report.output_tokens_per_s:.1f} output tokens/s, {report.requests_per_s:.2f} requests/s",
        f"goodput       {report.goodput_per_s:.2f} requests/s, {100 * report.good_share:.1f}% of all"
        f" within {_objectives_text(report.objectives)}",
        "",
        f"{'ms':10}{'p50':>10}{'p95':>10}{'p99':>10}{'max':>10}{'mean':>10}",
    ]
    for name in ("ttft", "tpot", "itl", "total"):
        spread: Spread | None = getattr(report, f"{name}_ms")
        if spread is not None:
            values = (spread.p50, spread.p95, spread.p99, spread.max, spread.mean)
            lines.append(f"{name.upper():10}" + "".join(f"{value:10.1f}" for value in values))
    lines += [f"error: {error}" for error in report.errors]
    return "\n".join(lines)


def _objectives_text(objectives: Objectives) -> str:
    named = (("TTFT", objectives.ttft_ms), ("TPOT", objectives.tpot_ms))
    return " and ".join(f"{name} <= {limit:g} ms" for name, limit in named if limit is not None) or "no limits"
