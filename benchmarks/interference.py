"""W4: streams that decode steadily while long prompts arrive, and what the streams feel of them.

Eight streams run throughout: one that ends is followed by another. In a window of time the long prompts arrive as a
Poisson process does that has so many arrivals in it: at independent, uniform times. What counts are the gaps of the
streams that touch the window, also one that has not ended when the measuring does.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pdserve.cli.load_client import LoadClient, StreamRecord
from pdserve.cli.load_plan import Lengths, PlannedRequest, closed_loop
from pdserve.cli.load_report import Spread, gaps_ms, ttft_ms

NUM_STREAMS = 8
_STREAM = Lengths(64, 1_024)
LONG_PROMPT = 2_048
_SETTLED_TOKENS = 8  # of each stream, before the window begins
_SETTLE_TIMEOUT_S = 120.0
_LEAST_DRAIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Window:
    """When was measured; `stopped_at` is when the streams were cut off, at or after `end`."""

    start: float
    end: float
    stopped_at: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


async def measure_interference(client: LoadClient, num_long: int, rate_per_s: float, seed: int) -> Mapping[str, float]:
    """Return the figures of one window of `num_long` long prompts.

    Raises:
        SystemExit: a request failed, or the streams do not begin.
    """
    steady: list[StreamRecord] = []
    longs: list[StreamRecord] = []
    seconds = num_long / rate_per_s
    async with asyncio.TaskGroup() as tasks:
        streams = [
            tasks.create_task(stream_on(client, steady, f"{seed} {index}"), name=f"steady stream {index}")
            for index in range(NUM_STREAMS)
        ]
        await settled(steady)
        start = time.monotonic()
        plan = _long_plan(num_long, seconds, seed)
        long_tasks = [
            tasks.create_task(_send_at(client, longs, request, start), name=f"long prompt {index}")
            for index, request in enumerate(plan)
        ]
        await asyncio.sleep(seconds)
        await asyncio.wait(long_tasks, timeout=max(seconds, _LEAST_DRAIN_S))
        stopped_at = time.monotonic()
        for task in (*streams, *long_tasks):
            task.cancel()
    _check([*steady, *longs])
    await _drained(client, seed)
    return figures_of(steady, longs, Window(start, start + seconds, stopped_at))


def figures_of(steady: Sequence[StreamRecord], longs: Sequence[StreamRecord], window: Window) -> Mapping[str, float]:
    """Return what the records of one window say. Pure."""
    gaps = Spread.of(gap for record in steady for gap in gaps_in(record, window))
    if gaps is None:
        raise SystemExit("no gap of a stream was measured")
    # A prompt without a token has waited until the end at least: the figure is a lower bound.
    waits_ms = Spread.of(
        ttft_ms(record) if record.events else 1e3 * (window.stopped_at - record.sent_at) for record in longs
    )
    assert waits_ms is not None
    output = sum(count for record in steady for at, count in record.events if window.start <= at <= window.end)
    prompts = sum(record.num_prompt for record in longs if record.events and record.events[0][0] <= window.end)
    return {
        "ITL p50 ms": gaps.p50,
        "ITL p95 ms": gaps.p95,
        "ITL p99 ms": gaps.p99,
        "ITL max ms": gaps.max,
        "long TTFT p50 ms": waits_ms.p50,
        "long TTFT max ms": waits_ms.max,
        "long prompts unanswered": float(sum(not record.events for record in longs)),
        "output tokens/s": output / window.seconds,
        "tokens/s, prompts and output": (prompts + output) / window.seconds,
        "streams decoding, mean": sum(_seconds_in(record, window) for record in steady) / window.seconds,
    }


def gaps_in(record: StreamRecord, window: Window) -> Iterator[float]:
    """Yield the gaps in ms that touch the window, the last one as far as it was seen if the stream was cut off."""
    for gap, (at, _) in zip(gaps_ms(record), record.events[1:], strict=True):
        if at >= window.start and at - gap / 1e3 <= window.end:
            yield gap
    is_cut_off = record.events and not record.ended_at
    if is_cut_off and record.events[-1][0] <= window.end:
        yield 1e3 * (window.stopped_at - record.events[-1][0])


def _seconds_in(record: StreamRecord, window: Window) -> float:
    """Return how long a stream was between its first and its last token within the window."""
    if not record.events:
        return 0.0
    last = record.ended_at or window.stopped_at
    return max(0.0, min(last, window.end) - max(record.events[0][0], window.start))


async def stream_on(client: LoadClient, records: list[StreamRecord], seed: str) -> None:
    """Stream one request after the other until cancelled."""
    for number in itertools.count():
        [request] = closed_loop(1, _STREAM, _number(f"{seed} {number}"))
        record = StreamRecord(len(request.prompt), request.num_output, sent_at=time.monotonic())
        records.append(record)
        await client.stream(request, record)
        if record.error is not None:
            return  # the end of the run looks at it


async def _send_at(client: LoadClient, records: list[StreamRecord], request: PlannedRequest, start: float) -> None:
    due_at = start + (request.arrives_at_s or 0.0)
    await asyncio.sleep(due_at - time.monotonic())
    record = StreamRecord(len(request.prompt), request.num_output, sent_at=due_at)
    records.append(record)
    await client.stream(request, record)


def _long_plan(count: int, seconds: float, seed: int) -> list[PlannedRequest]:
    chance = random.Random(f"arrivals {seed}")
    times = sorted(chance.uniform(0.0, seconds) for _ in range(count))
    requests = closed_loop(count, Lengths(LONG_PROMPT, 1), _number(f"long {seed}"))
    return [PlannedRequest(request.prompt, request.num_output, at) for request, at in zip(requests, times, strict=True)]


async def settled(steady: Sequence[StreamRecord]) -> None:
    """Wait until every stream decodes."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while sum(len(record.events) >= _SETTLED_TOKENS for record in steady) < NUM_STREAMS:
        _check(steady)
        if time.monotonic() > deadline:
            raise SystemExit(f"not all of {NUM_STREAMS} streams decode after {_SETTLE_TIMEOUT_S:g} s")
        await asyncio.sleep(0.05)


async def _drained(client: LoadClient, seed: int) -> None:
    """Wait until what was cut off is gone from the server: a short request is answered behind it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_SETTLE_TIMEOUT_S):
            await client.run(closed_loop(2, Lengths(16, 4), _number(f"drain {seed}")), concurrency=1)


def _check(records: Sequence[StreamRecord]) -> None:
    errors = [record.error for record in records if record.error is not None]
    if errors:
        raise SystemExit(f"{len(errors)} of {len(records)} requests failed: {errors[0]}")


def _number(seed: str) -> int:
    return random.Random(seed).getrandbits(32)
