"""The compiled CPU kernels against torch on the shapes of the demo model, alternating, in one run.

    .venv/bin/python benchmarks/cpu_kernels.py [--threads N] [--build avx2]

Prints a Markdown table: medians in ms, the ratio torch / ours (above 1: ours is faster), and what ours reaches in GB/s
of weights or keys and values, and in GFLOP/s. Weights rotate through more memory than the caches hold. With one thread
it is that thread's CPU time that counts, so that a busy machine disturbs less.
"""

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from amounts import above_zero

import pdserve.kernels.cpu as cpu
from pdserve.kernels.attention import AttentionSpan, paged_attention
from pdserve.kernels.cpu import CpuKernels
from pdserve.kernels.kv_rows import pack_rows, row_elements

Clock = Callable[[], float]

_LINEAR_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
_NUM_ROWS = (1, 4, 16, 64, 512)
_ATTENTION = (
    ("1 x 1,024", [(1, 1024)]),
    ("16 x 256", [(1, 256)] * 16),
    ("512 of 512", [(512, 512)]),
    ("512 of 2,048", [(512, 2048)]),
)
_ROTATION_BYTES = 200e6
_ROUNDS = 7


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=above_zero(int), default=len(os.sched_getaffinity(0)))
    parser.add_argument("--build", help="avx512bf16, avx512vnni, avx512, avx2 or generic; else the best")
    arguments = parser.parse_args()
    num_threads = arguments.threads
    kernels, int8 = (_kernels(arguments.build, num_threads, is_int8) for is_int8 in (False, True))
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    print(f"{kernels.description}; torch {torch.__version__}, {num_threads} threads\n")
    print("| operation | torch ms | ours ms | torch / ours | GB/s | GFLOP/s |\n|---|---|---|---|---|---|")
    for num_outputs, num_inputs in _LINEAR_SHAPES:
        for num_rows in _NUM_ROWS:
            if num_outputs < 10_000 or num_rows <= 16:  # logits are computed for sampled rows only
                for each in (kernels, int8):
                    _linear(each, each is int8, num_rows, num_outputs, num_inputs, clock)
    for name, lengths in _ATTENTION:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
            _attention(kernels, name, lengths, dtype, clock)


def _kernels(build: str | None, num_threads: int, is_int8: bool) -> CpuKernels:
    if build is None:
        kernels = CpuKernels.load(num_threads, is_int8=is_int8)
    else:
        [path] = Path(cpu.__file__).parent.glob(f"cpu_{build}.*so")
        kernels = CpuKernels(ctypes.CDLL(str(path)), num_threads, is_int8=is_int8)
    if kernels is None:
        raise SystemExit("the CPU kernels are not built: install a C++ compiler, then make setup")
    return kernels


def _linear(kernels: CpuKernels, is_int8: bool, num_rows: int, num_outputs: int, num_inputs: int, clock: Clock) -> None:
    size_bytes = (1 if is_int8 else 4) * num_outputs * num_inputs
    count = max(1, min(40, int(_ROTATION_BYTES / (4 * num_outputs * num_inputs))))
    weights = [torch.randn(num_outputs, num_inputs) for _ in range(count)]
    packed = [kernels.pack(weight) for weight in weights]
    rows = torch.randn(num_rows, num_inputs)
    theirs, ours = _alternate(
        [lambda weight=weight: F.linear(rows, weight) for weight in weights],
        [lambda weight=weight: kernels.linear(rows, weight, None) for weight in packed],
        clock,
    )
    flops = 2 * num_rows * num_outputs * num_inputs
    _print(
        f"{'int8' if is_int8 else 'float32'} {num_outputs}x{num_inputs}, {num_rows} rows",
        theirs,
        ours,
        size_bytes,
        flops,
    )


def _attention(
    kernels: CpuKernels, name: str, lengths: list[tuple[int, int]], dtype: torch.dtype, clock: Clock
) -> None:
    num_heads, num_kv_heads, head_dim, block_size = 9, 3, 64, 16
    num_blocks = sum(-(-context_len // block_size) for _, context_len in lengths)
    order = torch.randperm(num_blocks)
    spans, start, block = [], 0, 0
    for query_len, context_len in lengths:
        count = -(-context_len // block_size)
        spans.append(AttentionSpan(start, query_len, context_len, order[block : block + count].clone()))
        start, block = start + query_len, block + count
    layers = pack_rows(torch.randn(num_blocks, 8, 2, num_kv_heads, block_size, head_dim), dtype)
    query = torch.randn(start, num_heads, head_dim)
    prepared = kernels.prepare(spans)
    theirs, ours = _alternate(
        [lambda i=i: paged_attention(query, layers[:, i], spans, 0.125) for i in range(8)],
        [lambda i=i: kernels.attention(query, layers[:, i], prepared, 0.125) for i in range(8)],
        clock,
    )
    row_bytes = dtype.itemsize * row_elements(head_dim, dtype)
    size_bytes = 2 * num_kv_heads * row_bytes * sum(context_len for _, context_len in lengths)
    pairs = sum(q * (c - q) + q * (q + 1) // 2 for q, c in lengths)
    _print(
        f"attention {name}, {str(dtype).removeprefix('torch.')}",
        theirs,
        ours,
        size_bytes,
        4 * pairs * num_heads * head_dim,
    )


def _alternate(
    theirs: list[Callable[[], object]], ours: list[Callable[[], object]], clock: Clock
) -> tuple[float, float]:
    """Return the medians, in seconds a call, of rounds A B A B."""
    for call in (theirs[0], ours[0]):
        call()
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for calls, found in zip((theirs, ours), seconds, strict=True):
            started = clock()
            for call in calls:
                call()
            found.append((clock() - started) / len(calls))
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def _print(name: str, theirs: float, ours: float, size_bytes: int, flops: int) -> None:
    figures = f"{theirs * 1e3:.3f} | {ours * 1e3:.3f} | {theirs / ours:.2f}"
    print(f"| {name} | {figures} | {size_bytes / ours / 1e9:.1f} | {flops / ours / 1e9:.0f} |", flush=True)


if __name__ == "__main__":
    main()
