"""What W4 and W6 count: gaps within a window, promises kept, the rate up to which they are."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pdserve.cli.load_client import StreamRecord
from pdserve.cli.load_report import Objectives

Load = Callable[[str], ModuleType]


def _record(times: list[float], sent_at: float = 0.0, ended_at: float = 0.0, num_prompt: int = 64) -> StreamRecord:
    events = [(at, 1) for at in times]
    return StreamRecord(num_prompt, max(2, len(times)), sent_at=sent_at, ended_at=ended_at, events=events)


def test_gaps_that_touch_the_window_count_whole(load: Load) -> None:
    window = load("interference").Window(10.0, 20.0, 25.0)
    # Before it, into it, within it, out of it, after it.
    record = _record([8.0, 9.0, 11.0, 12.0, 21.0, 22.0], ended_at=22.0)

    assert list(load("interference").gaps_in(record, window)) == [2_000.0, 1_000.0, 9_000.0]


def test_a_stream_that_stalls_until_it_is_cut_off_shows_its_stall(load: Load) -> None:
    window = load("interference").Window(10.0, 20.0, 25.0)

    assert list(load("interference").gaps_in(_record([11.0, 12.0]), window)) == [1_000.0, 13_000.0]
    assert list(load("interference").gaps_in(_record([11.0, 12.0], ended_at=12.0), window)) == [1_000.0]


def test_prompts_that_wait_at_the_end_are_counted_and_bound_the_latency(load: Load) -> None:
    window = load("interference").Window(10.0, 20.0, 25.0)
    longs = [_record([14.0], 11.0, 14.0, 2_048), _record([22.0], 12.0, 22.0, 2_048), _record([], 15.0, 0.0, 2_048)]
    steady = [_record([10.0 + 0.1 * step for step in range(101)], ended_at=0.0)]

    figures = load("interference").figures_of(steady, longs, window)

    assert figures["long TTFT max ms"] == 10_000.0 and figures["long TTFT p50 ms"] == 10_000.0
    assert figures["long prompts unanswered"] == 1.0
    assert figures["tokens/s, prompts and output"] == pytest.approx((2_048 + 100) / 10.0, abs=0.2)
    assert figures["streams decoding, mean"] == 1.0


def _trial(load: Load, rate: float, ttfts: list[float], system: str = "ours", tpot_ms: float | None = 20.0) -> Any:
    return load("ladder").Trial(system, 0, rate, tuple((ttft, tpot_ms) for ttft in ttfts), cpu_s=1.0)


def test_the_rate_lies_where_the_share_of_good_requests_falls_below_the_limit(load: Load) -> None:
    objectives, goodput_of = Objectives(1_000.0, 40.0), load("ladder").goodput_of
    all_good = _trial(load, 1.0, [100.0] * 10)
    nearly = _trial(load, 4.0, [100.0] * 8 + [5_000.0] * 2)
    never = _trial(load, 8.0, [5_000.0] * 10)

    # From a share of 1 to 0.8 the limit of 0.9 is halfway, which is 2 between the rates 1 and 4.
    assert goodput_of([all_good, nearly, never], objectives) == pytest.approx(2.0)
    assert goodput_of([never, nearly, all_good], objectives) == pytest.approx(2.0)
    assert goodput_of([all_good, _trial(load, 4.0, [100.0] * 9 + [5_000.0]), never], objectives) == pytest.approx(4.0)
    assert goodput_of([all_good], objectives) == 1.0  # the least that it can be
    assert goodput_of([never], objectives) == 0.0


def test_a_tenth_may_miss(load: Load) -> None:
    objectives = Objectives(1_000.0, 40.0)

    assert _trial(load, 1.0, [500.0] * 9 + [1_500.0]).keeps(objectives)
    assert not _trial(load, 1.0, [500.0] * 8 + [1_500.0] * 2).keeps(objectives)
    assert not _trial(load, 1.0, [500.0] * 10, tpot_ms=41.0).keeps(objectives)
    assert _trial(load, 1.0, [500.0] * 10, tpot_ms=None).keeps(objectives)


def test_what_failed_or_was_cut_off_is_no_answer(load: Load) -> None:
    answer_of = load("goodput").answer_of
    failed = _record([0.5, 0.6], 0.0, 0.6)
    failed.error = "503"

    assert answer_of(_record([0.5, 0.7], 0.0, 0.7)) == (500.0, 200.0)
    assert answer_of(_record([0.5], 0.0, 0.5)) == (500.0, None)
    assert answer_of(_record([0.5, 0.7], 0.0)) is None and answer_of(_record([], 0.0)) is None
    assert answer_of(failed) is None


def test_the_loosest_promise_is_broken_only_with_all_others(load: Load) -> None:
    loosest = load("ladder").loosest

    assert loosest([Objectives(450.0, 100.0), Objectives(2_000.0, 40.0)]) == Objectives(2_000.0, 100.0)
    assert loosest([Objectives(450.0, None), Objectives(2_000.0, 40.0)]) == Objectives(2_000.0, None)


def test_every_system_has_its_rate_for_every_promise(load: Load) -> None:
    ladder = load("ladder")
    trials = [
        _trial(load, rate, [ttft_ms] * 10, system)
        for system, times in {"ours": (400.0, 900.0, 3_000.0), "peer": (900.0, 3_000.0, 3_000.0)}.items()
        for rate, ttft_ms in zip((1.0, 2.0, 4.0), times, strict=True)
    ]

    ours, peer = ladder.goodputs(trials, ladder.GRID)

    assert len(ours.figures) == 12 and ours.cpu_s == 3.0
    assert ours.figures["450 ms, then 15 ms"] == 0.0  # further tokens take 20
    assert 1.0 < ours.figures["450 ms, then 25 ms"] < 2.0 < ours.figures["1,000 ms, then 25 ms"] < 4.0
    assert peer.figures["450 ms, then 100 ms"] == 0.0 and 1.0 < peer.figures["2,000 ms, then 100 ms"] < 2.0
    assert ladder.cpu_ms_per_request(trials, "ours") == 100.0


@pytest.mark.parametrize(
    ("record", "now", "has_missed"),
    [
        (_record([], 0.0), 0.9, False),
        (_record([], 0.0), 1.1, True),
        (_record([1.2, 1.3], 0.0, 1.3), 2.0, True),
        (_record([0.5, 0.6], 0.0, 0.6), 9.0, False),
        (_record([0.5, 0.8], 0.0, 0.8), 9.0, True),
        # Two tokens, the second not there 0.2 s after the first: its pace cannot be 100 ms any more.
        (_record([0.5], 0.0), 0.55, False),
        (_record([0.5], 0.0), 0.7, True),
    ],
)
def test_a_promise_is_broken_as_soon_as_it_cannot_be_kept(
    load: Load, record: StreamRecord, now: float, has_missed: bool
) -> None:
    assert load("goodput").has_missed(record, Objectives(1_000.0, 100.0), now) is has_missed


def test_a_trace_is_stretched_to_the_rate_with_the_same_lengths_and_other_prompts(load: Load) -> None:
    trace = Path(__file__).parents[2] / "benchmarks" / "data" / "azure_conversation_2023_first2000.csv"
    requests = load("goodput").TraceRequests(trace, min_count=50, span_s=20.0, divisor=8.0, seed=3)

    slow, fast = requests.at(2.0, trial=1), requests.at(4.0, trial=2)

    assert len(slow) == 50 and slow[-1].arrives_at_s == pytest.approx(49 / 2.0)
    assert len(fast) == 80 and fast[-1].arrives_at_s == pytest.approx(79 / 4.0)
    assert [len(one.prompt) for one in slow] == [len(one.prompt) for one in fast[:50]]
    assert slow[0].prompt != fast[0].prompt
