"""What W4 and W6 count: gaps within a window, promises kept, the highest rate."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

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


async def test_the_highest_rate_is_bracketed_and_bisected(load: Load) -> None:
    asked: list[float] = []

    async def holds(rate: float) -> bool:
        asked.append(rate)
        return rate <= 5.0

    found = await load("goodput").highest_rate(holds, 1.1)

    assert asked[:4] == [1.0, 2.0, 4.0, 8.0]
    assert 5.0 / 1.1 <= found <= 5.0


@pytest.mark.parametrize(("limit", "found"), [(0.0, 0.0), (1e9, 64.0)])
async def test_rates_beyond_what_is_looked_at_end_the_search(load: Load, limit: float, found: float) -> None:
    async def holds(rate: float) -> bool:
        return rate <= limit

    assert await load("goodput").highest_rate(holds, 1.1) == found


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


def test_a_tenth_may_miss(load: Load) -> None:
    good, bad = _record([0.5], 0.0, 0.5), _record([5.0], 0.0, 5.0)
    objectives = Objectives(1_000.0, None)

    assert load("goodput").is_possible([good] * 9 + [bad], objectives, 9.0)
    assert not load("goodput").is_possible([good] * 8 + [bad] * 2, objectives, 9.0)


def test_a_trace_is_stretched_to_the_rate_with_the_same_lengths_and_other_prompts(load: Load) -> None:
    trace = Path(__file__).parents[2] / "benchmarks" / "data" / "azure_conversation_2023_first2000.csv"
    requests = load("goodput").TraceRequests(trace, min_count=50, span_s=20.0, divisor=8.0, seed=3)

    slow, fast = requests.at(2.0, trial=1), requests.at(4.0, trial=2)

    assert len(slow) == 50 and slow[-1].arrives_at_s == pytest.approx(49 / 2.0)
    assert len(fast) == 80 and fast[-1].arrives_at_s == pytest.approx(79 / 4.0)
    assert [len(one.prompt) for one in slow] == [len(one.prompt) for one in fast[:50]]
    assert slow[0].prompt != fast[0].prompt
