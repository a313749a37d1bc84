"""W6: the highest rate at which a server keeps its promises, found by doubling and bisection.

At every rate the requests of a trace are sent from its beginning, with other prompts of the same lengths and its time
stretched, for so long that the rate is no burst that a queue swallows. A rate is held if 90 % of them meet the
objectives. A trial ends as soon as that cannot happen any more.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.cli.load_client import LoadClient, StreamRecord
from pdserve.cli.load_plan import Lengths, PlannedRequest, TraceScale, closed_loop, read_trace
from pdserve.cli.load_report import Objectives, tpot_ms, ttft_ms

GOOD_SHARE = 0.9
_FIRST_RATE = 1.0
_RATES = (1 / 16, 64.0)  # what is looked at, requests a second
_LOOK_S = 0.25
_DRAIN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class TraceRequests:
    """Which requests a trial sends: those of `span_s`, at least `min_count`. The trace's lengths are divided."""

    trace: Path
    min_count: int
    span_s: float
    divisor: float
    seed: int

    def at(self, rate_per_s: float, trial: int) -> tuple[PlannedRequest, ...]:
        """Return them at a mean rate, with prompts that no earlier trial had."""
        count = max(self.min_count, math.ceil(rate_per_s * self.span_s))
        natural = read_trace(self.trace, count, TraceScale(lengths=self.divisor), self.seed)
        natural_span_s = max(1e-3, natural[-1].arrives_at_s or 0.0)
        scale = TraceScale(lengths=self.divisor, time=(len(natural) - 1) / rate_per_s / natural_span_s)
        return read_trace(self.trace, count, scale, self.seed + trial)


async def highest_rate(holds: Callable[[float], Awaitable[bool]], precision: float) -> float:
    """Return the highest rate that `holds`, within a factor of `precision`; 0.0 if none of those looked at does.

    Doubles or halves from 1 a second until one rate holds and the next does not, then halves the factor between them.
    """
    rate = _FIRST_RATE
    if await holds(rate):
        low = rate
        while (high := 2 * low) <= _RATES[1] and await holds(high):
            low = high
        if high > _RATES[1]:
            return low
    else:
        high = rate
        while (low := high / 2) >= _RATES[0] and not await holds(low):
            high = low
        if low < _RATES[0]:
            return 0.0
    while high / low > precision:
        middle = (low * high) ** 0.5
        if await holds(middle):
            low = middle
        else:
            high = middle
    return low


async def measure_goodput(
    client: LoadClient, requests: TraceRequests, objectives: Objectives, precision: float
) -> float:
    """Return the highest rate that the server holds.

    Raises:
        SystemExit: it does not answer any more.
    """
    trial = 0

    async def holds(rate_per_s: float) -> bool:
        nonlocal trial
        trial += 1
        is_held = await _is_held(client, requests.at(rate_per_s, trial), objectives)
        promised = f"{objectives.ttft_ms} and {objectives.tpot_ms} ms"
        print(f"  {rate_per_s:.3g} requests/s within {promised}: {'held' if is_held else 'missed'}", flush=True)
        await _drained(client, requests.seed + trial)
        return is_held

    return await highest_rate(holds, precision)


async def _is_held(client: LoadClient, plan: Sequence[PlannedRequest], objectives: Objectives) -> bool:
    started_at = time.monotonic()
    records = [
        StreamRecord(len(one.prompt), one.num_output, sent_at=started_at + (one.arrives_at_s or 0.0)) for one in plan
    ]
    async with asyncio.TaskGroup() as group:
        open_tasks = {
            group.create_task(_send(client, request, record), name=f"request {index}")
            for index, (request, record) in enumerate(zip(plan, records, strict=True))
        }
        while open_tasks and is_possible(records, objectives, time.monotonic()):
            _, open_tasks = await asyncio.wait(open_tasks, timeout=_LOOK_S)
        for task in open_tasks:
            task.cancel()
    return is_possible(records, objectives, time.monotonic())


async def _send(client: LoadClient, request: PlannedRequest, record: StreamRecord) -> None:
    await asyncio.sleep(record.sent_at - time.monotonic())
    await client.stream(request, record)


def is_possible(records: Sequence[StreamRecord], objectives: Objectives, now: float) -> bool:
    """Return whether the share of good requests can still be reached at `now`. Pure."""
    num_missed = sum(has_missed(record, objectives, now) for record in records)
    return len(records) - num_missed >= GOOD_SHARE * len(records)


def has_missed(record: StreamRecord, objectives: Objectives, now: float) -> bool:
    """Return whether a request can no longer meet the objectives at `now`; one that has ended says it for good."""
    if record.error is not None:
        return True
    if not record.events:
        waited_ms = 1e3 * (now - record.sent_at)
        return objectives.ttft_ms is not None and waited_ms > objectives.ttft_ms
    if objectives.ttft_ms is not None and ttft_ms(record) > objectives.ttft_ms:
        return True
    if objectives.tpot_ms is None:
        return False
    if record.ended_at:
        tpot = tpot_ms(record)
        return tpot is not None and tpot > objectives.tpot_ms
    first_at, first_count = record.events[0]
    return 1e3 * (now - first_at) > objectives.tpot_ms * (record.num_asked - first_count)


async def _drained(client: LoadClient, seed: int) -> None:
    """Let what was cut off leave the server before the next trial.

    A server that refuses requests under load has missed them, and that is a figure; one that does not answer a single
    request after the load has none.

    Raises:
        SystemExit: it does not answer.
    """
    plan = closed_loop(2, Lengths(16, 4), seed + 1_000_003)
    try:
        async with asyncio.timeout(_DRAIN_TIMEOUT_S):
            records = await client.run(plan, concurrency=1)
    except TimeoutError:
        raise SystemExit(f"no answer for {_DRAIN_TIMEOUT_S:g} s after a trial") from None
    for record in records:
        if record.error is not None:
            raise SystemExit(f"no answer after a trial: {record.error}")
