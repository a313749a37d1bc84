"""What memory serves: how much of it the KV pool is, what a sequence wastes of it, what a node takes beside it.

    .venv/bin/python benchmarks/memory.py

Counts come from the offline engine. Sizes are of real processes: an installation with a small pool is loaded until
every block has been written, and then the resident memory of its nodes is held against weights + pool + 300 MB.
"""

import argparse
import asyncio
import json
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from amounts import above_zero
from systems import RunningSystem, System, running

from pdserve.cli.load_client import LoadClient, Target
from pdserve.cli.load_plan import Lengths, closed_loop
from pdserve.engine.block_pool import BlockId
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.model_source import resolve_model
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec

_MB = 1e6
_ALLOWED_MB = 300.0
_DTYPES = ("float32", "int8")


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Bytes given and used, and the most slots without a token that a running sequence ever held."""

    given_bytes: int
    block_bytes: int
    num_blocks: int
    block_size: int
    most_in_use: int  # blocks, at a time
    most_wasted: int  # slots of one sequence
    num_seen: int  # sequences, summed over steps


def count(config: EngineConfig, num_requests: int, longest: int) -> PoolUse:
    """Run more requests of random lengths than fit, and look at every block table after every step."""
    engine = Engine.load(config)
    chance = random.Random(1)
    for index in range(num_requests):
        prompt = tuple(chance.randrange(3, engine.facts.vocab_size) for _ in range(chance.randrange(1, longest)))
        sampling = SamplingParams(max_tokens=chance.randrange(1, longest), temperature=0.0, seed=0, ignore_eos=True)
        engine.add(SequenceSpec(str(index), prompt, sampling))
    most_in_use = most_wasted = num_seen = 0
    while engine.scheduler.has_work:
        ended = {output.seq_id for output in engine.step() if output.finish_reason is not None}
        usage = engine.pool.usage()
        most_in_use = max(most_in_use, usage.in_use)
        for index in range(num_requests):
            sequence = engine.scheduler.sequence(str(index))
            if sequence is not None and sequence.block_table and str(index) not in ended:
                num_slots = len(sequence.block_table) * config.block_size
                most_wasted = max(most_wasted, num_slots - sequence.num_tokens)
                num_seen += 1
    engine.close()
    block_bytes = engine.block_bytes(BlockId(0)).nbytes
    return PoolUse(
        config.kv_memory_bytes,
        block_bytes,
        engine.pool.num_blocks,
        config.block_size,
        most_in_use,
        most_wasted,
        num_seen,
    )


def weights_bytes(model_dir: Path, dtype: str) -> float:
    """Return the size of the weights; in int8 the embedding stays mapped as the checkpoint has it, beside its copy."""
    in_float32 = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    config = json.loads((model_dir / "config.json").read_text())
    embedding = 4 * config["vocab_size"] * config["hidden_size"]
    return in_float32 if dtype == "float32" else in_float32 / 4 + embedding


def node_pids(server: RunningSystem) -> dict[str, int]:
    """Return the processes of the nodes by their role."""
    found = {}
    for pid in server.pids():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        found |= {role: pid for role in ("prefill", "decode") if role.encode() in words}
    return found


def resident_mb(pid: int) -> tuple[float, float]:
    """Return the resident memory of a process, now and at its most."""
    status = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    return int(status["VmRSS"]) * 1024 / _MB, int(status["VmHWM"]) * 1024 / _MB


async def fill(url: str, num_tokens: int) -> None:
    """Send different prompts until `num_tokens` have been in the cache, twice over."""
    num_requests = 2 * num_tokens // 320 + 8
    async with LoadClient.open(Target(url)) as client:
        records = await client.run(closed_loop(num_requests, Lengths(256, 64), seed=7), concurrency=2)
    if failed := [record.error for record in records if record.error is not None]:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")


def measure_nodes(model_dir: Path, dtype: str, kv_bytes: int, num_tokens: int) -> list[str]:
    """Return a row for each node of an installation whose pools have been filled."""
    pdserve = str(Path(sys.executable).with_name("pdserve"))
    options = ("--model", str(model_dir), "--dtype", dtype, "--kv-memory", str(kv_bytes))
    weights_mb = weights_bytes(model_dir, dtype) / _MB
    rows = []
    with running(System("pdserve", (pdserve, "serve", "--port", "0", *options), " ".join(options))) as server:
        at_start = {role: resident_mb(pid)[0] for role, pid in node_pids(server).items()}
        asyncio.run(fill(server.url, num_tokens))
        for role, pid in node_pids(server).items():
            now, most = resident_mb(pid)
            beside = now - weights_mb - kv_bytes / _MB
            verdict = "yes" if beside <= _ALLOWED_MB else "NO"
            rows.append(
                f"| {role}, {dtype} | {weights_mb:.0f} | {kv_bytes / _MB:.0f} | {at_start[role]:.0f} | {now:.0f} "
                f"| {most:.0f} | {beside:.0f} | {verdict} |"
            )
    return rows


def main() -> None:
    """Count, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a float32 model directory; default: the demo model")
    parser.add_argument("--dtype", action="append", choices=_DTYPES, help="default: both")
    parser.add_argument("--kv-memory-bytes", type=above_zero(int), default=128 * 1024**2)
    options = parser.parse_args()
    model_dir = options.model or resolve_model(None, progress=lambda line: None)
    use = count(
        EngineConfig(model_dir=model_dir, dtype="int8", kv_memory_bytes=options.kv_memory_bytes), 24, longest=200
    )
    share = use.num_blocks * use.block_bytes / use.given_bytes
    print(f"memory given to the pool that is blocks: {share:.2%} ({use.num_blocks} of {use.block_bytes:,} bytes)")
    print(f"blocks in use at a time, at most: {use.most_in_use / use.num_blocks:.1%}")
    print(
        f"slots without a token in a sequence, at most: {use.most_wasted} of a block of {use.block_size} "
        f"(seen {use.num_seen:,} times)\n"
    )
    print("| node | weights MB | pool MB | RSS at start | RSS filled | RSS at most | beside both | <= 300 MB |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype in options.dtype or _DTYPES:
        rows = measure_nodes(model_dir, dtype, options.kv_memory_bytes, use.num_blocks * use.block_size)
        print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
