"""What the split itself costs: one request at a time through gateway, prefill, transfer and decode, and offline.

    .venv/bin/python benchmarks/split.py --output results
    .venv/bin/python benchmarks/split.py --quick
    .venv/bin/python benchmarks/split.py --beside

An installation of real processes (one prefill node, one decode node) and the offline engine, in this process, answer
the same prompts in turn, so that load on the machine meets both. TTFT is until the first token, total until the last;
the ratios are medians over rounds of the ratio of one round. CPU is that of all processes of the installation. The
table of stages has the medians of what the gateway
(`return_route_info`) and both ends of the transfer (`--transfer-spans-file`) say of each request.

With `--beside` the offline engine answers once more in each round, beside a process that takes for each token the
processor time that this client and all of the installation but its engines took: the least that the split can cost
where they share the cores.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import aiohttp
from amounts import above_zero
from outputs import output_folder
from systems import RunningSystem, System, running

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.model_source import resolve_model
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec

_TTFT_TARGET, _TOTAL_TARGET = 1.1, 1.05
_SPAN_WAIT_S, _POLL_S = 5.0, 0.02

# Reads seconds, each a double, and computes for as long.
_NEIGHBOUR = """\
import os, struct, time
while seconds := os.read(0, 8):
    end = time.thread_time() + struct.unpack("d", seconds)[0]
    while time.thread_time() < end:
        pass
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: seconds to the first and to the last token, and milliseconds of its stages."""

    ttft_s: float
    total_s: float
    num_tokens: int
    cpu_s: float
    other_cpu_s: float = 0.0  # of `cpu_s` what no engine took, and the client's
    stages: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked: prompts of these lengths in each round, and outputs of one length."""

    lengths: Sequence[int]
    num_output: int
    num_rounds: int
    has_beside: bool


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompt length both ways, in one round; `beside` is offline beside what the split takes besides."""

    num_prompt: int
    offline: Answer
    split: Answer
    beside: Answer | None


def answer_offline(
    engine: Engine, prompt: tuple[int, ...], num_output: int, on_token: Callable[[], object] = lambda: None
) -> Answer:
    """Let the engine answer alone."""
    sampling = SamplingParams(max_tokens=num_output, temperature=0.0, seed=0, ignore_eos=True)
    times = []
    started, cpu = time.perf_counter(), time.process_time()
    engine.add(SequenceSpec("a", prompt, sampling))
    while engine.scheduler.has_work:
        if any(output.token is not None for output in engine.step()):
            times.append(time.perf_counter() - started)
            on_token()
    return Answer(times[0], times[-1], len(times), time.process_time() - cpu)


@contextmanager
def _neighbour() -> Iterator[Callable[[float], object]]:
    """Start a process that computes for as many seconds as it is told, whenever it is."""
    command = (sys.executable, "-I", "-S", "-c", _NEIGHBOUR)
    with subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0) as process:  # ends when its input does
        write = cast(BinaryIO, process.stdin).write
        yield lambda seconds: write(struct.pack("d", seconds))


async def answer_split(
    session: aiohttp.ClientSession, server: RunningSystem, prompt: tuple[int, ...], num_output: int, spans: Path
) -> Answer:
    """Ask the installation, and read what it says of the stages."""
    body = {
        "model": await _model(session, server.url),
        "prompt": list(prompt), "max_tokens": num_output, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "return_route_info": True,
    }  # fmt: skip
    times: list[tuple[float, int]] = []
    route: dict[str, Any] = {}
    request_id = ""
    cpu, other_cpu = server.cpu_s(), _other_cpu_s(server)
    started, own_cpu = time.perf_counter(), time.thread_time()
    async with session.post(f"{server.url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            raise SystemExit(f"{reply.status}: {await reply.text()}")
        async for line in reply.content:
            now = time.perf_counter() - started
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(str(event["error"]))
            request_id = event["id"]
            count = sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
            if count:
                times.append((now, count))
            route = (event.get("route_info") or [route])[0]
    own_cpu = time.thread_time() - own_cpu
    if route.get("route") != "disaggregated":
        raise SystemExit(f"the request went another way: {route}")
    stages = _stages(times, route, await _spans_of(request_id, spans))
    num_tokens = sum(count for _, count in times)
    other_cpu = own_cpu + _other_cpu_s(server) - other_cpu
    return Answer(times[0][0], times[-1][0], num_tokens, server.cpu_s() - cpu, other_cpu, stages)


def _other_cpu_s(server: RunningSystem) -> float:
    """Return the processor time of all but engines."""
    computing = {("prefill", "engine"), ("decode", "engine")}
    return sum(spent for thread, spent in server.thread_cpu_s().items() if thread not in computing)


def _stages(times: list[tuple[float, int]], route: dict[str, Any], spans: list[dict[str, Any]]) -> dict[str, float]:
    at = route["stages_ms"]
    by_side = {span["side"]: span for span in spans}
    sender, receiver = by_side["sender"], by_side["receiver"]
    marks = {
        "request read, admitted": (at["admitted"] or 0.0),
        "task at the prefill node": at["prefilling"] - (at["admitted"] or 0.0),
        "prompt computed, first token at the gateway": at["first_token"] - at["prefilling"],
        "first token at the client": 1e3 * times[0][0] - at["first_token"],
        "offer to grant (while the prompt is computed)": 1e3 * (sender["grant_s"] or 0.0),
        "last block to acknowledgement": 1e3 * (sender["tail_s"] or 0.0),
        "commit at the decode node": 1e3 * (receiver["tail_s"] or 0.0),
        "first token to the second": 1e3 * (times[1][0] - times[0][0]),
        "each further token": 1e3 * (times[-1][0] - times[1][0]) / max(1, sum(count for _, count in times[2:])),
    }
    return marks


async def _spans_of(request_id: str, path: Path) -> list[dict[str, Any]]:
    """Return what both ends wrote of a request; they write when its transfer has ended."""
    deadline = time.monotonic() + _SPAN_WAIT_S
    while time.monotonic() < deadline:
        spans = [span for span in _read_spans(path) if request_id in str(span["request_id"])]
        if len(spans) >= 2:
            return spans
        await asyncio.sleep(_POLL_S)
    raise SystemExit(f"the nodes wrote no spans of {request_id}: {_read_spans(path)[-2:]}")


def _read_spans(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


async def _model(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/v1/models") as reply:
        return str((await reply.json())["data"][0]["id"])


@dataclass(frozen=True, slots=True)
class Ways:
    """Who answers, and whom to tell how long to compute beside the engine."""

    engine: Engine
    session: aiohttp.ClientSession
    server: RunningSystem
    spans: Path
    tell_neighbour: Callable[[float], object]

    async def pair(self, plan: Plan, prompts: Sequence[tuple[int, ...]], is_split_first: bool) -> Pair:
        """Let each answer a prompt of its own: what one has computed is in a cache."""
        answers: dict[str, Answer] = {}
        for name in ("split", "offline") if is_split_first else ("offline", "split"):
            if name == "offline":
                answers[name] = await asyncio.to_thread(answer_offline, self.engine, prompts[0], plan.num_output)
            else:
                answers[name] = await answer_split(self.session, self.server, prompts[1], plan.num_output, self.spans)
        beside = None
        if plan.has_beside:
            tell = partial(self.tell_neighbour, answers["split"].other_cpu_s / plan.num_output)
            beside = await asyncio.to_thread(answer_offline, self.engine, prompts[2], plan.num_output, tell)
        return Pair(len(prompts[0]), answers["offline"], answers["split"], beside)


async def compare(engine: Engine, server: RunningSystem, spans: Path, plan: Plan, pairs: list[Pair]) -> None:
    """Ask both in turn, and add what they took to `pairs`; which is first changes from round to round."""
    chance = random.Random(1)
    with _neighbour() as tell_neighbour:
        async with aiohttp.ClientSession() as session:
            ways = Ways(engine, session, server, spans, tell_neighbour)
            for number in range(-1, plan.num_rounds):  # round -1 warms both
                for length in plan.lengths:
                    prompts = [tuple(chance.randrange(3, 40_000) for _ in range(length)) for _ in range(3)]
                    pair = await ways.pair(plan, prompts, is_split_first=number % 2 == 0)
                    if number >= 0:
                        pairs.append(pair)
                        print(_line(pair), flush=True)


def _line(pair: Pair) -> str:
    return (
        f"load {os.getloadavg()[0]:.1f}, prompt {pair.num_prompt}: TTFT {1e3 * pair.split.ttft_s:.0f} / "
        f"{1e3 * pair.offline.ttft_s:.0f} ms, total {pair.split.total_s:.2f} / {pair.offline.total_s:.2f} s"
    )


def markdown(pairs: Sequence[Pair]) -> str:
    """Return the table of ratios and that of stages."""
    ways = ("offline", "split", "ratio")
    header = ["prompt", *(f"{name}, {way}" for name in ("TTFT ms", "total s", "CPU s") for way in ways)]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lengths = list(dict.fromkeys(pair.num_prompt for pair in pairs))
    for length in lengths:
        own = [pair for pair in pairs if pair.num_prompt == length]
        cells = []
        for name, unit, digits in (("ttft_s", 1e3, 0), ("total_s", 1.0, 2), ("cpu_s", 1.0, 2)):
            offline = [getattr(pair.offline, name) for pair in own]
            split = [getattr(pair.split, name) for pair in own]
            ratio = statistics.median(ours / theirs for ours, theirs in zip(split, offline, strict=True))
            cells += [f"{unit * statistics.median(each):.{digits}f}" for each in (offline, split)] + [f"{ratio:.2f}"]
        lines.append(f"| {length:,} | " + " | ".join(cells) + " |")
    lines += ["", f"Targets: TTFT <= {_TTFT_TARGET}, total <= {_TOTAL_TARGET}.", ""]
    lines += [
        "| stage, ms | " + " | ".join(f"{length:,}" for length in lengths) + " |",
        "|---" * (1 + len(lengths)) + "|",
    ]
    for stage in pairs[0].split.stages:
        values = (
            statistics.median(pair.split.stages[stage] for pair in pairs if pair.num_prompt == length)
            for length in lengths
        )
        lines.append(f"| {stage} | " + " | ".join(f"{value:.1f}" for value in values) + " |")
    per_token = (
        statistics.median(
            1e3 * (pair.offline.total_s - pair.offline.ttft_s) / (pair.offline.num_tokens - 1)
            for pair in pairs
            if pair.num_prompt == length
        )
        for length in lengths
    )
    lines.append("| each token after the first, offline | " + " | ".join(f"{value:.1f}" for value in per_token) + " |")
    if pairs[0].beside is not None:
        lines += ["", *_beside_lines(pairs, lengths)]
    return "\n".join(lines) + "\n"


def _beside_lines(pairs: Sequence[Pair], lengths: Sequence[int]) -> list[str]:
    lines = [
        "| prompt | CPU but engines, ms a token | total, offline beside it / alone | split / offline beside it |",
        "|---|---|---|---|",
    ]
    for length in lengths:
        own = [(pair, pair.beside) for pair in pairs if pair.num_prompt == length and pair.beside is not None]
        per_token_ms = statistics.median(1e3 * pair.split.other_cpu_s / pair.split.num_tokens for pair, _ in own)
        beside = statistics.median(beside.total_s / pair.offline.total_s for pair, beside in own)
        split = statistics.median(pair.split.total_s / beside.total_s for pair, beside in own)
        lines.append(f"| {length:,} | {per_token_ms:.2f} | {beside:.2f} | {split:.2f} |")
    return lines


def main() -> None:
    """Compare as argv asks; print Markdown and save it with the JSON."""
    options = _parser().parse_args()
    model_dir = options.model or resolve_model(None, progress=lambda line: None)
    lengths = options.prompt or ((64, 512) if options.quick else (64, 512, 1_024))
    plan = Plan(lengths, *((32, 2) if options.quick else (options.output_tokens, options.rounds)), options.beside)
    pairs: list[Pair] = []
    try:
        _measure(options, model_dir, plan, pairs)
    finally:  # also of what was ended by Ctrl-C
        if pairs:
            text = markdown(pairs)
            print(text)
            if options.output is not None:
                options.output.mkdir(parents=True, exist_ok=True)
                saved = json.dumps([asdict(pair) for pair in pairs], indent=1)
                (options.output / "split.json").write_text(saved + "\n")
                (options.output / "split.md").write_text(text)


def _measure(options: argparse.Namespace, model_dir: Path, plan: Plan, pairs: list[Pair]) -> None:
    engine = Engine.load(EngineConfig(model_dir=model_dir, dtype=options.dtype))
    pdserve = str(Path(sys.executable).with_name("pdserve"))
    with tempfile.TemporaryDirectory(prefix="pdserve-split-") as folder:
        spans = Path(folder) / "spans.jsonl"
        flags = ("--model", str(model_dir), "--dtype", options.dtype, "--transfer-spans-file", str(spans))
        command = (pdserve, "serve", "--port", "0", *flags, *options.option)
        with running(System("pdserve", command, " ".join(command))) as server:
            asyncio.run(compare(engine, server, spans, plan, pairs))
    engine.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory; default: the demo model")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument(
        "--prompt", type=above_zero(int), action="append", help="prompt tokens; default: 64, 512 and 1,024"
    )
    parser.add_argument("--output-tokens", type=above_zero(int), default=128)
    parser.add_argument("--rounds", type=above_zero(int), default=5)
    parser.add_argument("--quick", action="store_true", help="prompts of 64 and 512, outputs of 32, two rounds")
    parser.add_argument("--beside", action="store_true", help="also offline beside what the split takes besides")
    parser.add_argument("--option", action="append", default=[], help="a flag for `pdserve serve`, as --flag=value")
    parser.add_argument("--output", type=output_folder, help="folder for JSON and Markdown")
    return parser


if __name__ == "__main__":
    main()
