"""What streams and long prompts get of the same cores: tokens/s of both, gaps, and whose threads had the time.

    .venv/bin/python benchmarks/shared_cores.py pdserve pdserve-colocated pdserve-tpot150 --rounds 2

Eight streams decode while two clients send one prompt of 2,048 tokens after the other. A window lasts from the answer
to one prompt to that to another, so that no prompt is counted in part.
"""

import argparse
import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence

from amounts import above_zero
from interference import LONG_PROMPT, NUM_STREAMS, Window, gaps_in, settled, stream_on
from peers.catalogue import OURS, system_of
from systems import RunningSystem, running

from pdserve.cli.load_client import LoadClient, StreamRecord, Target
from pdserve.cli.load_plan import Lengths, closed_loop
from pdserve.cli.load_report import Spread

_NUM_CLIENTS = 2
_LOOK_S = 0.02
_ANSWER_TIMEOUT_S = 300.0


def main() -> None:
    """Start the systems named in argv, ask them in turn, print a line for each window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="+", choices=list(OURS))
    parser.add_argument("--rounds", type=above_zero(int), default=2)
    parser.add_argument("--seconds", type=above_zero(float), default=5.0, help="the least length of a window")
    options = parser.parse_args()
    asyncio.run(_compare(options.systems, options.rounds, options.seconds))


async def _compare(names: Sequence[str], num_rounds: int, seconds: float) -> None:
    async with contextlib.AsyncExitStack() as stack:
        servers = [stack.enter_context(running(system_of(name, "W4"))) for name in names]
        clients = [await stack.enter_async_context(LoadClient.open(Target(server.url))) for server in servers]
        for number in range(num_rounds):
            for server, client in zip(servers, clients, strict=True):
                print(await _window(server, client, seconds, 1_000 * number), flush=True)


async def _window(server: RunningSystem, client: LoadClient, seconds: float, seed: int) -> str:
    steady, longs = list[StreamRecord](), list[StreamRecord]()
    numbers = itertools.count(100_000 + seed)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream_on(client, steady, f"{seed} {index}")) for index in range(NUM_STREAMS)]
        await settled(steady)
        tasks += [group.create_task(_send_on(client, longs, numbers)) for _ in range(_NUM_CLIENTS)]
        start, before = await _next_answer(longs), server.thread_cpu_s()
        await asyncio.sleep(seconds)
        end, after = await _next_answer(longs), server.thread_cpu_s()
        for task in tasks:
            task.cancel()
    window = Window(start, end, end)
    prompts = sum(record.num_prompt for record in longs if record.events and start < record.events[0][0] <= end)
    output = sum(count for record in steady for at, count in record.events if start < at <= end)
    gaps = Spread.of(gap for record in steady for gap in gaps_in(record, window))
    cores = {thread: (after[thread] - before[thread]) / window.seconds for thread in after}
    return (
        f"{server.system.name}: prompts {prompts / window.seconds:.0f} and streams {output / window.seconds:.0f} "
        f"tokens/s, gaps p99 {gaps.p99 if gaps else 0.0:.0f} ms, cores: "
        + ", ".join(f"{role} {kind} {value:.2f}" for (role, kind), value in cores.items() if value >= 0.01)
    )


async def _send_on(client: LoadClient, longs: list[StreamRecord], numbers: "itertools.count[int]") -> None:
    for number in numbers:
        [request] = closed_loop(1, Lengths(LONG_PROMPT, 1), number)
        record = StreamRecord(LONG_PROMPT, 1, sent_at=time.monotonic())
        longs.append(record)
        await client.stream(request, record)
        if record.error is not None:
            raise SystemExit(f"a long prompt failed: {record.error}")


async def _next_answer(longs: Sequence[StreamRecord]) -> float:
    """Wait until one more prompt is answered; return when it was."""
    known = sum(bool(record.events) for record in longs)
    deadline = time.monotonic() + _ANSWER_TIMEOUT_S
    while sum(bool(record.events) for record in longs) == known:
        if time.monotonic() > deadline:
            raise SystemExit(f"no long prompt was answered for {_ANSWER_TIMEOUT_S:g} s")
        await asyncio.sleep(_LOOK_S)
    return max(record.events[0][0] for record in longs if record.events)


if __name__ == "__main__":
    main()
