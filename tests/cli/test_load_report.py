"""The numbers of a report are those of the records."""

import pytest

from pdserve.cli.load_client import StreamRecord
from pdserve.cli.load_report import Objectives, Spread, percentile, report_of, report_table


def record(sent_at: float, *times: float, error: str | None = None) -> StreamRecord:
    """A stream with one token at each time."""
    return StreamRecord(
        num_prompt=10,
        num_asked=len(times),
        sent_at=sent_at,
        ended_at=max(times, default=sent_at + 1),
        events=[(at, 1) for at in times],
        error=error,
    )


def test_percentiles_of_a_known_series() -> None:
    series = [float(value) for value in range(1, 102)]

    assert Spread.of(reversed(series)) == Spread(p50=51, p95=96, p99=100, max=101, mean=51)
    assert percentile([10.0, 20.0], 25) == 12.5
    assert percentile([7.0], 99) == 7.0
    assert Spread.of([]) is None


def test_latencies_and_rates_of_two_streams() -> None:
    records = [record(100.0, 100.5, 100.6, 100.9), record(101.0, 102.0, 102.2, 102.4)]

    report = report_of(records, Objectives())

    assert report.ttft_ms is not None and report.tpot_ms is not None and report.itl_ms is not None
    assert (report.ttft_ms.p50, report.ttft_ms.max) == pytest.approx((750, 1000))
    assert (report.tpot_ms.p50, report.tpot_ms.max) == pytest.approx((200, 200))
    assert report.itl_ms.max == pytest.approx(300)
    assert report.duration_s == pytest.approx(2.4)
    assert report.output_tokens_per_s == pytest.approx(6 / 2.4)
    assert (report.prompt_tokens, report.output_tokens, report.num_failed) == (20, 6, 0)


def test_a_failed_request_is_counted_and_is_never_good() -> None:
    records = [record(0.0, 0.1, 0.2), record(0.0, 0.1, error="502: gone"), record(0.0)]

    report = report_of(records, Objectives())

    assert (report.num_requests, report.num_failed) == (3, 2)
    assert set(report.errors) == {"502: gone", "no token came"}
    assert report.good_share == pytest.approx(1 / 3)
    assert report.output_tokens == 2


@pytest.mark.parametrize(
    ("objectives", "share"),
    [
        (Objectives(), 1.0),
        (Objectives(ttft_ms=600), 0.5),
        (Objectives(tpot_ms=150), 0.5),
        (Objectives(ttft_ms=600, tpot_ms=150), 0.0),
    ],
)
def test_goodput_counts_what_meets_every_objective(objectives: Objectives, share: float) -> None:
    late_but_steady = record(0.0, 1.0, 1.1, 1.2)
    early_but_slow = record(0.0, 0.5, 0.7, 0.9)

    report = report_of([late_but_steady, early_but_slow], objectives)

    assert report.good_share == share
    assert report.goodput_per_s == pytest.approx(2 * share / 1.2)


def test_tokens_that_come_together_are_counted_each() -> None:
    grouped = StreamRecord(4, 5, sent_at=0.0, ended_at=0.9, events=[(0.1, 1), (0.5, 2), (0.9, 2)])

    report = report_of([grouped], Objectives())

    assert report.tpot_ms is not None and report.itl_ms is not None
    assert report.tpot_ms.mean == pytest.approx(200)
    assert report.itl_ms.max == pytest.approx(400)
    assert "5 of output" in report_table(report)
