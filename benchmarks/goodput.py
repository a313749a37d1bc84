"""W6: the requests of a trace at rising rates, and what each of them got.

At every rate the requests of a trace are sent from its beginning, with other prompts of the same lengths and its time
stretched, for so long that the rate is no burst that a queue swallows. All systems are asked the same at the same
rates: the steps of one ladder, which each begins well below what it can do and leaves when it keeps no promise.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ladder import Answer

from pdserve.cli.load_client import LoadClient, StreamRecord
from pdserve.cli.load_plan import Lengths, PlannedRequest, TraceScale, closed_loop, read_trace
from pdserve.cli.load_report import Objectives, tpot_ms, ttft_ms

_FIRST_PARTS = (1 / 6, 1 / 2)  # of what a system can do at most; the latter if the former takes longer than this:
_LONGEST_S = 60.0
_AT_ONCE = 16  # to find that
_LOOK_S = 0.25
_DRAIN_TIMEOUT_S = 60.0
_FIRST_TRIAL = 100  # steps below 1 a second have numbers below 0


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


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rates of which each is `factor` times the one before, and `loosest`: who breaks that breaks every promise."""

    requests: TraceRequests
    factor: float
    loosest: Objectives

    def rate_per_s(self, step: int) -> float:
        """Return the rate of a step; that of step 0 is 1 a second."""
        return float(self.factor**step)

    async def first_step(self, client: LoadClient) -> int:
        """Return where to begin with a server, measured by as many requests of the trace as it answers at once.

        Raises:
            SystemExit: it does not answer.
        """
        plan = self.requests.at(1.0, 0)
        started_at = time.monotonic()
        records = await client.run(plan, _AT_ONCE)
        most = len(plan) / (time.monotonic() - started_at)
        if all(record.error is not None for record in records):
            raise SystemExit(f"no request was answered: {records[0].error}")
        first = max(_FIRST_PARTS[0] * most, min(_FIRST_PARTS[1] * most, self.requests.min_count / _LONGEST_S))
        return math.floor(math.log(first, self.factor))

    async def ask(self, client: LoadClient, step: int) -> tuple[Answer, ...]:
        """Send the requests of a step; return what they got.

        Raises:
            SystemExit: the server does not answer any more.
        """
        trial = _FIRST_TRIAL + step
        answers = await _answers(client, self.requests.at(self.rate_per_s(step), trial), self.loosest)
        await _drained(client, self.requests.seed + trial)
        return answers


async def _answers(client: LoadClient, plan: Sequence[PlannedRequest], loosest: Objectives) -> tuple[Answer, ...]:
    """Send `plan`; wait for its requests as long as one of those that are open could still be good."""
    started_at = time.monotonic()
    records = [
        StreamRecord(len(one.prompt), one.num_output, sent_at=started_at + (one.arrives_at_s or 0.0)) for one in plan
    ]
    async with asyncio.TaskGroup() as group:
        sending = {
            group.create_task(_send(client, request, record), name=f"request {index}"): record
            for index, (request, record) in enumerate(zip(plan, records, strict=True))
        }
        open_tasks = set(sending)
        while any(not has_missed(sending[task], loosest, time.monotonic()) for task in open_tasks):
            _, open_tasks = await asyncio.wait(open_tasks, timeout=_LOOK_S)
        for task in open_tasks:
            task.cancel()
    return tuple(answer_of(record) for record in records)


def answer_of(record: StreamRecord) -> Answer:
    """Return what counts of a request: nothing of one that failed or was cut off."""
    if record.error is not None or not record.events or not record.ended_at:
        return None
    tpot = tpot_ms(record)
    return round(ttft_ms(record), 2), None if tpot is None else round(tpot, 3)


async def _send(client: LoadClient, request: PlannedRequest, record: StreamRecord) -> None:
    await asyncio.sleep(record.sent_at - time.monotonic())
    await client.stream(request, record)


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
