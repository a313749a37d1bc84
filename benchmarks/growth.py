"""How a decode step grows with the batch and the context, and what of it is not the model.

    .venv/bin/python benchmarks/growth.py --output results
    .venv/bin/python benchmarks/growth.py --quick

The offline engine decodes sequences whose blocks are filled with random keys and values, so that no prompt has to be
computed first. Step time and tok/s are by the clock. Bookkeeping is all of `Engine.step` but the model's run:
scheduler, layout of the batch, sampler, blocks and outputs; its share is of the CPU time of the thread that steps,
which others on the machine disturb less.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from amounts import above_zero
from line_plot import line_plot
from outputs import output_folder

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.model_source import resolve_model
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.kernels.kv_rows import kv_torch_dtype, pack_rows

_BATCHES, _CONTEXTS = (1, 2, 4, 8, 16, 32, 64), (128, 512, 2_048, 8_192)
_PLOTTED_BATCHES = (1, 4, 16, 64)
_MOST_TOKENS = 65_536  # in the cache at a time: 3 GB of the demo model's float32 keys and values
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.8},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top-k 40": {"temperature": 0.8, "top_k": 40},
    "penalties": {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


@dataclass(frozen=True, slots=True)
class Cell:
    """Medians over the steps of one batch."""

    dtype: str
    kind: str
    batch: int
    context: int
    step_ms: float
    tokens_per_s: float
    bookkeeping_ms: float  # CPU time of the stepping thread
    share: float  # of that thread's CPU time


class ModelTime:
    """The CPU time that the calling thread has spent in the model."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @classmethod
    @contextmanager
    def counted(cls) -> Iterator["ModelTime"]:
        """Count every run of a model until the block is left."""
        counted, run = cls(), ModelRunner.run

        def timed(runner: ModelRunner, *arguments: Any) -> Any:
            started = time.thread_time()
            try:
                return run(runner, *arguments)
            finally:
                counted.seconds += time.thread_time() - started

        ModelRunner.run = timed  # type: ignore[method-assign, assignment]  # put back below
        try:
            yield counted
        finally:
            ModelRunner.run = run  # type: ignore[method-assign]


def measure(engine: Engine, dtype: str, kind: str, batch: int, context: int, num_steps: int) -> Cell:
    """Decode `num_steps` tokens of `batch` sequences up to `context`."""
    _fill(engine, _KINDS[kind], batch, max(1, context - num_steps - 2))
    engine.step()
    walls, books, shares = [], [], []
    with ModelTime.counted() as model:
        for _ in range(num_steps):
            model.seconds, started, cpu = 0.0, time.perf_counter(), time.thread_time()
            outputs = engine.step()
            cpu = time.thread_time() - cpu
            assert len(outputs) == batch and all(output.failure is None for output in outputs)
            walls.append(time.perf_counter() - started)
            books.append(cpu - model.seconds)
            shares.append(1 - model.seconds / cpu)
    for index in range(batch):
        engine.scheduler.abort(str(index))
    wall, median = statistics.median(walls), statistics.median
    return Cell(dtype, kind, batch, context, 1e3 * wall, batch / wall, 1e3 * median(books), median(shares))


def _fill(engine: Engine, fields: dict[str, Any], batch: int, num_tokens: int) -> None:
    """Let `batch` sequences of `num_tokens` tokens begin to decode."""
    draw = np.random.default_rng(1)
    facts = engine.facts
    shape = (facts.num_layers, 2, facts.num_kv_heads, facts.block_size, facts.head_dim)
    values = torch.from_numpy(draw.standard_normal(shape, dtype=np.float32) * 0.5)
    rows = pack_rows(values, kv_torch_dtype(facts.kv_dtype)).contiguous()
    block = memoryview(rows.view(torch.uint8).flatten().numpy())
    for index in range(batch):
        prompt = tuple(draw.integers(3, engine.facts.vocab_size, num_tokens).tolist())
        sampling = SamplingParams(seed=index, ignore_eos=True, max_tokens=None, **fields)
        engine.add_import(SequenceSpec(str(index), prompt, sampling))
    for seq_id, missing in engine.grant_imports():
        engine.land(seq_id, [(each, block) for each in missing])
        engine.scheduler.commit_import(seq_id, [3])
    assert engine.scheduler.num_running + engine.scheduler.num_waiting == batch, "the cache is too small"


def main() -> None:
    """Measure what argv asks for; print Markdown and save JSON, Markdown and plots."""
    options = _parser().parse_args()
    model_dir = options.model or resolve_model(None, progress=lambda line: None)
    cells: list[Cell] = []
    try:
        for dtype in options.dtype or ("int8", "float32"):
            _measure_all(options, model_dir, dtype, cells)
    finally:  # also of what was ended by Ctrl-C
        if cells:
            text = markdown(cells)
            print(text)
            if options.output is not None:
                save(options.output, cells, text)


def _measure_all(options: argparse.Namespace, model_dir: Path, dtype: str, cells: list[Cell]) -> None:
    batches, contexts = ((1, 4, 16), (128, 1_024)) if options.quick else (_BATCHES, _CONTEXTS)
    num_steps = 10 if options.quick else options.steps
    engine = Engine.load(
        EngineConfig(
            model_dir=model_dir, dtype=dtype, kv_cache_dtype=options.kv_cache_dtype, num_threads=options.threads,
            max_num_seqs=max(batches), kv_memory_bytes=options.kv_memory_bytes, enable_prefix_cache=False,
            growth_reserve=0.0,
        )
    )  # fmt: skip
    grid = [(batch, context) for context in contexts for batch in batches if batch * context <= _MOST_TOKENS]
    for each in grid:
        cells.append(measure(engine, dtype, "greedy", *each, num_steps))
    for kind in _KINDS:
        if kind != "greedy":
            cells.append(measure(engine, dtype, kind, 16, contexts[0], num_steps))
    engine.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory; default: the demo model")
    parser.add_argument(
        "--dtype", action="append", choices=("int8", "float32"), help="default: both, one after the other"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="of keys and values; default: what the weights imply")
    parser.add_argument("--steps", type=above_zero(int), default=30, help="steps of each batch")
    parser.add_argument("--threads", type=above_zero(int), help="default: one a core")
    parser.add_argument("--kv-memory-bytes", type=above_zero(int), default=4 * 1024**3)
    parser.add_argument("--quick", action="store_true", help="three batches, two contexts, ten steps")
    parser.add_argument("--output", type=output_folder, help="folder for JSON, Markdown and plots")
    return parser


def markdown(cells: Sequence[Cell]) -> str:
    """Return the tables: every batch and context, and the kinds of sampling."""
    lines = [
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "",
        "| weights | sampling | batch | context | step ms | tokens/s | bookkeeping ms | us a sequence | share |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        lines.append(
            f"| {cell.dtype} | {cell.kind} | {cell.batch} | {cell.context:,} | {cell.step_ms:.1f} "
            f"| {cell.tokens_per_s:.0f} | {cell.bookkeeping_ms:.2f} | {1e3 * cell.bookkeeping_ms / cell.batch:.0f} "
            f"| {cell.share:.1%} |"
        )
    return "\n".join(lines) + "\n"


def save(folder: Path, cells: Sequence[Cell], text: str) -> None:
    """Write growth.json, growth.md and the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "growth.json").write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    (folder / "growth.md").write_text(text)
    greedy = [cell for cell in cells if cell.kind == "greedy"]
    for field, name in (("step_ms", "step, ms"), ("tokens_per_s", "tokens/s"), ("bookkeeping_ms", "bookkeeping, ms")):
        for over, other in (("batch", "context"), ("context", "batch")):
            lines: dict[str, list[tuple[float, float]]] = {}
            for cell in greedy:
                if over == "context" and cell.batch not in _PLOTTED_BATCHES:
                    continue
                key = f"{cell.dtype}, {other} {getattr(cell, other):,}"
                lines.setdefault(key, []).append((getattr(cell, over), getattr(cell, field)))
            plot = line_plot(f"Decode step by {over}", over, name, lines)
            (folder / f"growth-{field.replace('_', '-')}-by-{over}.svg").write_text(plot)


if __name__ == "__main__":
    main()
