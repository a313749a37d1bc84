"""What the gateway itself costs: a real gateway process on one core, before nodes that only say what a script says.

    .venv/bin/python benchmarks/gateway.py [--streams 64] [--tokens 200] [--requests 500] [--rounds 5]

Prints one JSON object. `cpu_us_per_token` is CPU time of the process (all threads) for each token more that it streams
to `--streams` clients at once: streams of all and of a quarter of `--tokens` are compared, so that their beginnings do
not count. The decode node says one token to each of them every `--step-ms`, as an engine does, in one message a step.
`floor_aiohttp` and `floor_write` are those of `stream_floor.py` on the same core: the same events from a bare aiohttp
handler, and from a bare write to the socket. The three take turns, each figure is the median of `--rounds`; on a
machine that others use too, the differences and ratios between them say more than the figures.
`request_ms` is the wall time of a whole one-token answer, one after the other on one connection, Redis and the scripted
nodes included; `floor_request` is the same of a bare aiohttp handler, by turns, and `floor_others` that of one which
asks Redis and the nodes for the same: what is above it is the gateway's own.
"""

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import zmq.asyncio
from amounts import above_zero

from pdserve.cli.embedded_redis import embedded_redis
from pdserve.control.channel import ControlServer, Peer
from pdserve.control.keyspace import Keyspace
from pdserve.control.messages import (
    BlockCounts,
    CancelTask,
    DecodeTask,
    FinishReason,
    GenerationTask,
    NodeInfo,
    NodeLoad,
    NodeRole,
    Ping,
    Pong,
    PrefillTask,
    Stage,
    StageReport,
    TokenChunk,
    TransferCounts,
)
from pdserve.control.node_registry import NodeRegistry
from pdserve.control.redis_connection import connect
from pdserve.engine.model_source import resolve_model

_START_S = 60.0
_LEASE_S = 10.0
_NUM_BLOCKS = 100_000
_WORDS = (253, 1820, 28, 665, 411, 338, 198, 30)  # ordinary tokens of the demo model


@dataclass(frozen=True, slots=True)
class Target:
    """Who streams: where to ask, and whose CPU time counts."""

    session: aiohttp.ClientSession
    path: str
    pid: int


class ScriptedNode:
    """A node that computes nothing: one token at once from a prefill node, the others step by step."""

    def __init__(self, context: zmq.asyncio.Context, role: NodeRole, step_s: float) -> None:
        self._server = ControlServer.bind(context, "tcp://127.0.0.1:0")
        self._step_s = step_s
        self._running: dict[str, tuple[Peer, GenerationTask, int]] = {}
        is_decode = role is NodeRole.DECODE
        self.info = NodeInfo(
            node_id=f"scripted-{role.value}",
            role=role,
            incarnation=secrets.token_hex(8),
            control_endpoint=self._server.endpoint,
            transfer_endpoint="tcp://127.0.0.1:9" if is_decode else None,
            model_name="scripted",
            model_digest="scripted",
            max_model_len=8192,
            block_size=16,
            num_blocks=_NUM_BLOCKS,
            version="0",
        )
        counts = BlockCounts(_NUM_BLOCKS, _NUM_BLOCKS, 0, 0, 0)
        self._load = NodeLoad(True, 0, 0, 0, None, 0.0, counts, TransferCounts(0, 0, 0, 0, 0))

    async def listen(self) -> None:
        """Take tasks until cancelled."""
        while True:
            peer, message = await self._server.recv()
            match message:
                case Ping():
                    held = tuple(attempt_id for attempt_id, (of_peer, _, _) in self._running.items() if of_peer == peer)
                    pong = Pong(message.sequence, self.info, self._load, held)
                    await self._server.send(peer, pong)
                case PrefillTask(task=task):
                    await self._server.send(peer, StageReport(task.attempt_id, Stage.PREFILLING))
                    self._say(peer, task, 0)
                case DecodeTask(task=task):
                    await self._server.send(peer, StageReport(task.attempt_id, Stage.DECODING))
                    if task.sampling.max_tokens != 1:
                        self._running[task.attempt_id] = (peer, task, 1)
                case CancelTask():
                    self._running.pop(message.attempt_id, None)

    async def step(self) -> None:
        """Say one token of each running task in every step, until cancelled."""
        while True:
            await asyncio.sleep(self._step_s)
            for attempt_id, (peer, task, position) in list(self._running.items()):
                self._running[attempt_id] = (peer, task, position + 1)
                if self._say(peer, task, position):
                    del self._running[attempt_id]

    def _say(self, peer: Peer, task: GenerationTask, position: int) -> bool:
        is_last = position + 1 == task.sampling.max_tokens
        chunk = TokenChunk(
            task.attempt_id,
            position,
            (_WORDS[position % len(_WORDS)],),
            None,
            FinishReason.LENGTH if is_last else None,
            0 if position == 0 else None,
        )
        self._server.say(peer, chunk)
        return is_last


async def _serve_nodes(redis_url: str, step_s: float) -> None:
    """Be the nodes of a process of their own."""
    context, redis = zmq.asyncio.Context(), connect(redis_url)
    registry = NodeRegistry(redis, Keyspace("bench"), _LEASE_S)
    nodes = [ScriptedNode(context, role, step_s) for role in (NodeRole.PREFILL, NodeRole.DECODE)]
    async with asyncio.TaskGroup() as tasks:
        for node in nodes:
            tasks.create_task(node.listen(), name=f"listen {node.info.node_id}")
            tasks.create_task(node.step(), name=f"step {node.info.node_id}")
        while True:
            for node in nodes:
                await registry.renew(node.info)
            await asyncio.sleep(_LEASE_S / 4)


@asynccontextmanager
async def _process(*command: str, cpu: int, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("wb") as written:
        # setpriv has the kernel end it with this process, however this process ends.
        alone = ("setpriv", "--pdeathsig", "KILL", "taskset", "-c", str(cpu), *command)
        process = await asyncio.create_subprocess_exec(*alone, stdout=written, stderr=written)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(10):
            await process.wait()


async def _url(log: Path) -> str:
    async with asyncio.timeout(_START_S):
        while True:
            _, found, url = (await asyncio.to_thread(log.read_text)).partition("listening on ")
            if found and "\n" in url:
                return url.split()[0]
            await asyncio.sleep(0.1)


async def _until_ready(session: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(_START_S):
        while True:
            async with session.get("/ready") as reply:
                if reply.status == 200:
                    return
            await asyncio.sleep(0.1)


def _cpu_s(pid: int) -> float:
    """CPU time of all threads of a process, from the scheduler's own nanoseconds."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def _whole(targets: dict[str, Target], count: int) -> dict[str, object]:
    """Ask each target `count` times, by turns of an eighth."""
    times: dict[str, list[float]] = {name: [] for name in targets}
    cpu_s = dict.fromkeys(targets, 0.0)
    turn = max(1, count // 8)
    for _ in range(0, count, turn):
        for name, target in targets.items():
            begun_s = _cpu_s(target.pid)
            times[name] += await _answers(target, turn)
            cpu_s[name] += _cpu_s(target.pid) - begun_s
    return {name: _of_requests(times[name], cpu_s[name]) for name in targets}


async def _answers(target: Target, count: int) -> list[float]:
    """Return the milliseconds of each of `count` requests."""
    body = {"model": "scripted", "prompt": "The capital of France is", "max_tokens": 1, "ignore_eos": True}
    times: list[float] = []
    for _ in range(count):
        begun = time.perf_counter()
        async with target.session.post(target.path, json=body) as reply:
            if reply.status != 200:
                raise SystemExit(await reply.text())
            await reply.read()
        times.append(1e3 * (time.perf_counter() - begun))
    return times


def _of_requests(times: list[float], cpu_s: float) -> dict[str, object]:
    ordered = sorted(times)
    return {
        "requests": len(times),
        "request_ms": {"p50": round(statistics.median(times), 2), "p99": round(ordered[len(times) * 99 // 100], 2)},
        "cpu_ms_per_request": round(1e3 * cpu_s / len(times), 2),
    }


async def _stream(target: Target, num_tokens: int) -> None:
    body = {"model": "scripted", "prompt": "Hi", "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    seen = b""
    async with target.session.post(target.path, json=body) as reply:
        async for content in reply.content.iter_any():
            seen += content
    if seen.count(b"data: ") != num_tokens + 1 or not seen.endswith(b"data: [DONE]\n\n"):
        raise SystemExit(f"{seen.count(b'data: ') - 1} events for {num_tokens} tokens: {seen[-300:]!r}")


async def _cpu_of_streams(target: Target, streams: int, num_tokens: int) -> float:
    cpu_s = _cpu_s(target.pid)
    await asyncio.gather(*(_stream(target, num_tokens) for _ in range(streams)))
    return _cpu_s(target.pid) - cpu_s


async def _streamed(targets: dict[str, Target], options: argparse.Namespace) -> dict[str, object]:
    streams, num_tokens = options.streams, options.tokens
    num_more = streams * (num_tokens - num_tokens // 4)
    us_per_token: dict[str, list[float]] = {name: [] for name in targets}
    rates: list[float] = []
    for target in targets.values():
        await _cpu_of_streams(target, streams, 8)  # connections and caches
    for number in range(options.rounds):
        _tell(f"streams, round {number + 1} of {options.rounds}")
        for name, target in targets.items():
            short_s = await _cpu_of_streams(target, streams, num_tokens // 4)
            begun = time.monotonic()
            cpu_s = await _cpu_of_streams(target, streams, num_tokens)
            if name == "gateway":
                rates.append(streams * num_tokens / (time.monotonic() - begun))
            us_per_token[name].append(1e6 * (cpu_s - short_s) / num_more)
    return {
        "streams": streams,
        "tokens_per_s": round(statistics.median(rates)),
        "cpu_us_per_token": {name: round(statistics.median(each), 1) for name, each in us_per_token.items()},
        "cpu_us_per_token_rounds": {name: [round(us, 1) for us in each] for name, each in us_per_token.items()},
    }


async def _measure(options: argparse.Namespace) -> None:
    cores = sorted(os.sched_getaffinity(0))
    with embedded_redis() as redis, tempfile.TemporaryDirectory() as folder:
        log, floor_log = Path(folder) / "gateway", Path(folder) / "floor"
        model_dir = str(resolve_model(None, progress=_tell))
        pdserve = str(Path(sys.executable).with_name("pdserve"))
        names = ("--model", model_dir, "--served-model-name", "scripted", "--namespace", "bench")
        gateway_command = (pdserve, "gateway", "--port", "0", "--redis-url", redis.url, *names)
        step = ("--step-ms", str(options.step_ms))
        nodes_command = (sys.executable, __file__, "--nodes-of", redis.url, *step)
        floor_options = (*step, "--redis-url", redis.url)
        floor_command = (sys.executable, str(Path(__file__).with_name("stream_floor.py")), *floor_options)
        async with (
            _process(*redis.command, cpu=cores[-1], log=Path(folder) / "redis"),
            _process(*nodes_command, cpu=cores[-1], log=Path(folder) / "nodes"),
            _process(*floor_command, cpu=cores[0], log=floor_log) as floor,
            _process(*gateway_command, cpu=cores[0], log=log) as gateway,
        ):
            os.sched_setaffinity(0, {cores[-1]})
            _tell("the gateway starts")
            async with _session(await _url(log)) as session, _session(await _url(floor_log)) as floor_session:
                await _until_ready(session)
                _tell("whole requests")
                whole = {
                    "gateway_request": Target(session, "/v1/completions", gateway.pid),
                    "floor_request": Target(floor_session, "/whole", floor.pid),
                    "floor_others": Target(floor_session, "/others", floor.pid),
                }
                await _whole(whole, 50)
                result = await _whole(whole, options.requests)
                targets = {
                    "gateway": Target(session, "/v1/completions", gateway.pid),
                    "floor_aiohttp": Target(floor_session, "/aiohttp", floor.pid),
                    "floor_write": Target(floor_session, "/write", floor.pid),
                }
                result |= await _streamed(targets, options)
    print(json.dumps(result))


def _tell(what: str) -> None:
    """Say on standard error what is being measured now."""
    print(what, file=sys.stderr, flush=True)


def _session(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0))


def main() -> None:
    """Measure and print, or be the scripted nodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=above_zero(int), default=64)
    parser.add_argument("--tokens", type=above_zero(int), default=200, help="tokens of each stream")
    parser.add_argument("--requests", type=above_zero(int), default=500)
    parser.add_argument("--rounds", type=above_zero(int), default=5)
    parser.add_argument("--step-ms", type=above_zero(float), default=15.0)
    parser.add_argument("--nodes-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.nodes_of:
        asyncio.run(_serve_nodes(options.nodes_of, options.step_ms / 1e3))
    else:
        asyncio.run(_measure(options))


if __name__ == "__main__":
    main()
