"""Throughput of BlockSender -> BlockReceiver, next to a bare pyzmq copy=False loop and a plain copy in the same run.

    .venv/bin/python benchmarks/transfer.py [--curve] [--decoding] [--json FILE] [--svg FILE]

All move frames of the same size between two processes, alternating round by round: bare pyzmq over loopback TCP and
over a Unix socket, ours over both, through shared memory, and by the way that it takes by itself on one machine; with
--curve also encrypted, with --decoding also to a node whose device computes steps of 20 ms and takes blocks between two
of them. The receiver of ours checks every block and copies it into a slot, as a decode node does; that of bare pyzmq
drops its frames. `checked` is bare pyzmq with what every receiver has to do that is sure of its blocks, a checksum at
both ends and a copy into a slot, and with the send buffer and the kept frame memory of ours. `memcpy` copies as many
bytes once in one process. Printed are the medians: GB/s by the clock, GB for each second of processor time of both
processes, which other work on the machine disturbs less, and both as parts of bare pyzmq's: over TCP for TCP, over the
Unix socket for that and for shared memory. How ours hides behind a prefill is measured by benchmarks/pipelining.py.
"""

import argparse
import asyncio
import json
import queue
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import xxhash
import zmq.asyncio
from amounts import above_zero
from bare_sockets import cpu_seconds, receive_frames, send_frames
from outputs import output_file
from transfer_ways import DECODING_WAYS, MIB, WAYS, Job, Way, curve_ways, make_slots

from pdserve.kvtransfer import (
    BlockReceiver,
    BlockSender,
    CurveKeys,
    PeerAddress,
    ReceiverConfig,
    SenderConfig,
    hash_blocks,
    keep_frame_memory,
)

DEADLINE_S = 120.0
CONCURRENCY = 4
STEP_S = 0.02


class Device:
    """One thread that computes steps, one after the other, and takes calls between two of them."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device")
        self._thread.start()

    async def call(self, function: Callable[[], None]) -> None:
        """Have the thread call this between two steps."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls.put((function, done))
        await done

    def close(self) -> None:
        """End the thread."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        weights = bytes(MIB)
        while True:
            step_ends_at = time.perf_counter() + STEP_S
            while time.perf_counter() < step_ends_at:
                xxhash.xxh64_intdigest(weights)  # work that leaves the interpreter to others
            while not self._calls.empty():
                if (call := self._calls.get()) is None:
                    return
                function, done = call
                function()
                done.get_loop().call_soon_threadsafe(done.set_result, None)


class SlotSink:
    """Copies what lands into a few reused slots."""

    def __init__(self, block_size_bytes: int, device: Device | None) -> None:
        self._slots = make_slots(block_size_bytes)
        self._device = device

    async def reserve(self, transfer_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> Sequence[int]:
        return range(len(block_hashes))

    async def land(self, transfer_id: str, blocks: Sequence[tuple[int, memoryview]], start: int) -> None:
        if self._device is not None:
            await self._device.call(lambda: self._copy(blocks, start))
        else:
            self._copy(blocks, start)

    def _copy(self, blocks: Sequence[tuple[int, memoryview]], start: int) -> None:
        for index, payload in blocks:
            self._slots[index % len(self._slots)][start : start + payload.nbytes] = payload

    async def commit(self, transfer_id: str, metadata: bytes) -> None:
        return None

    async def release(self, transfer_id: str, code: str, message: str) -> None:
        return None


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--block-kib",
        type=above_zero(int),
        nargs="+",
        default=[64, 256, 720, 1024, 4096],
        help="of a block (demo model: 720)",
    )
    parser.add_argument("--runs", type=above_zero(int), nargs="+", default=[1, 5], help="blocks that make one frame")
    parser.add_argument("--mib", type=above_zero(int), default=1_000, help="moved in a round")
    parser.add_argument("--rounds", type=above_zero(int), default=3)
    parser.add_argument("--ways", nargs="+", help="only these, as 'bare tcp'; with those that they are compared with")
    parser.add_argument("--curve", action="store_true", help="measure encrypted ways as well")
    parser.add_argument("--decoding", action="store_true", help="measure ours to a node that decodes as well")
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--svg", type=output_file)
    parser.add_argument("--receive", help=argparse.SUPPRESS)  # the other process: its job
    arguments = parser.parse_args()
    if arguments.receive:
        job = json.loads(arguments.receive)
        _receive(Job(Way(**job.pop("way")), **job))
        return
    rows: list[dict[str, Any]] = []
    try:
        asyncio.run(_compare(arguments, rows))
    finally:  # also of what was ended by Ctrl-C
        if rows and arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
        if rows and arguments.svg:
            arguments.svg.write_text(_plot(rows))


async def _compare(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    ways = [*WAYS, *(curve_ways() if arguments.curve else ()), *(DECODING_WAYS if arguments.decoding else ())]
    if arguments.ways is not None:
        wanted = {*arguments.ways, *(way.reference for way in ways if way.name in arguments.ways)}
        ways = [way for way in ways if way.name in wanted]
    print(f"{'block':>8} {'run':>3} {'way':18} {'GB/s':>6} {'of bare':>7} {'GB/CPU s':>8} {'of bare':>7}")
    for block_kib in arguments.block_kib:
        for run in arguments.runs:
            num_blocks = arguments.mib * 1024 // block_kib
            jobs = [Job(way, block_kib * 1024, run, num_blocks) for way in ways]
            measured: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
            for _ in range(arguments.rounds):
                for job in jobs:
                    measured[job.way.name].append(await _round(job))
            rows += _rows(jobs, measured)


def _rows(jobs: Sequence[Job], measured: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Print and return the medians of one size."""
    medians = {
        name: [statistics.median(each) for each in zip(*rounds, strict=True)] for name, rounds in measured.items()
    }
    rows = []
    for job in jobs:
        rate, per_cpu = medians[job.way.name]
        bare_rate, bare_per_cpu = medians[job.way.reference]
        row = {
            "block_kib": job.block_bytes // 1024,
            "run": job.run,
            "way": job.way.name,
            "gb_per_s": round(rate, 3),
            "of_bare": round(rate / bare_rate, 3),
            "gb_per_cpu_s": round(per_cpu, 3),
            "cpu_of_bare": round(per_cpu / bare_per_cpu, 3),
        }
        rows.append(row)
        print("{block_kib:5} KiB {run:3} {way:18} {gb_per_s:6.2f} {of_bare:7.2f} {gb_per_cpu_s:8.2f} "
              "{cpu_of_bare:7.2f}".format(**row), flush=True)  # fmt: skip
    rate = _memcpy_rate(jobs[0])
    rows.append({"block_kib": jobs[0].block_bytes // 1024, "run": jobs[0].run, "way": "memcpy", "gb_per_s": rate})
    print(f"{jobs[0].block_bytes // 1024:5} KiB {jobs[0].run:3} {'memcpy':18} {rate:6.2f}", flush=True)
    return rows


def _memcpy_rate(job: Job) -> float:
    source = memoryview(bytes(job.block_bytes))
    slots = make_slots(job.block_bytes)
    started_at = time.monotonic()
    for index in range(job.num_blocks):
        slots[index % len(slots)][:] = source
    return round(job.num_blocks * job.block_bytes / (time.monotonic() - started_at) / 1e9, 3)


async def _round(job: Job) -> tuple[float, float]:
    """Move the blocks once; return GB/s, and GB for a second of processor time at both ends."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--receive", json.dumps(asdict(job))),
        stdout=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None and child.stdin is not None
    try:
        ready = json.loads(await asyncio.wait_for(child.stdout.readline(), 60))
        before = cpu_seconds()
        if job.way.is_bare:
            seconds = await asyncio.to_thread(send_frames, ready["endpoint"], job)
        else:
            seconds = await _send_ours(ready["endpoint"], job)
        child.stdin.write(b"\n")
        ended = json.loads(await asyncio.wait_for(child.stdout.readline(), 60))
        cpu_s = cpu_seconds() - before + ended["cpu_s"]
    finally:
        child.stdin.close()
        await child.wait()
    gigabytes = job.num_blocks * job.block_bytes / 1e9
    return gigabytes / seconds, gigabytes / cpu_s


async def _send_ours(endpoint: str, job: Job) -> float:
    layout, size = job.layout, job.block_bytes
    run = memoryview(bytes(range(256)) * (job.run * size // 256))
    keys = None if job.way.secret_key is None else CurveKeys.from_secret(job.way.secret_key)
    config = SenderConfig(
        curve=keys,
        uses_shortcuts=job.way.is_default,
        shared_memory="auto" if job.way.is_default else job.way.shared_memory,
        compression="none",
    )
    turns = asyncio.Semaphore(CONCURRENCY)
    with zmq.asyncio.Context() as context:
        async with BlockSender(context, node_id="sender", incarnation="1", layout=layout, config=config) as sender:

            async def one(number: int, hashes: Sequence[bytes]) -> None:
                num_blocks = len(hashes)
                async with turns:
                    transfer = await sender.offer(
                        peer, f"t{number}", hashes, num_blocks * layout.block_size, DEADLINE_S
                    )
                    firsts = range(0, num_blocks, job.run)
                    await transfer.send_blocks((first, run[: (num_blocks - first) * size]) for first in firsts)
                    await transfer.finish(b"")

            peer = PeerAddress(endpoint, "receiver", "1")
            hashes = hash_blocks(range(job.per_transfer * layout.block_size), layout.block_size, "", "benchmark")
            await one(2**32 - 1, hashes[:1])  # the connection stands before the clock starts
            started_at = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for first in range(0, job.num_blocks, job.per_transfer):
                    group.create_task(one(first, hashes[: job.num_blocks - first]))
            return time.monotonic() - started_at


def _receive(job: Job) -> None:
    """The other process: receive until told to end, then say how much processor time it took."""
    endpoint = "tcp://127.0.0.1:0" if job.way.transport == "tcp" else f"ipc://@kv-benchmark-{secrets.token_hex(8)}"
    if job.way.is_bare:
        receive_frames(endpoint, job)
    else:
        asyncio.run(_receive_blocks(endpoint, job))


async def _receive_blocks(endpoint: str, job: Job) -> None:
    keys = None if job.way.secret_key is None else CurveKeys.from_secret(job.way.secret_key)
    keep_frame_memory()  # as a decode node does
    device = Device() if job.way.is_decoding else None
    identity = {"node_id": "receiver", "incarnation": "1", "layout": job.layout}
    sink, config = SlotSink(job.block_bytes, device), ReceiverConfig(curve=keys)
    try:
        with zmq.asyncio.Context() as context:
            async with BlockReceiver.bind(context, endpoint, **identity, sink=sink, config=config) as receiver:
                before = cpu_seconds()
                print(json.dumps({"endpoint": receiver.endpoint}), flush=True)
                await asyncio.to_thread(sys.stdin.readline)
                print(json.dumps({"cpu_s": cpu_seconds() - before}), flush=True)
    finally:
        if device is not None:
            device.close()


def _plot(rows: Sequence[dict[str, Any]]) -> str:
    """Draw GB/s as bars."""
    bar, left, width = 16, 230, 420
    most = max(row["gb_per_s"] for row in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 70}" height="{bar * len(rows) + 30}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{left}" y="14">GB/s</text>',
    ]
    for place, row in enumerate(rows):
        top, length = 22 + bar * place, row["gb_per_s"] / most * width
        color = "#4477aa" if row["way"].startswith("ours") else "#bbbbbb"
        label = f"{row['run']} x {row['block_kib']} KiB, {row['way']}"
        lines.append(f'<text x="{left - 6}" y="{top + 11}" text-anchor="end">{label}</text>')
        lines.append(f'<rect x="{left}" y="{top}" width="{length:.1f}" height="{bar - 3}" fill="{color}"/>')
        lines.append(f'<text x="{left + length + 4:.1f}" y="{top + 11}">{row["gb_per_s"]:.2f}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    main()
