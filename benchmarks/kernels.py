"""Every Triton kernel on a GPU against the torch reference of the same signature, and against what the GPU can do.

    .venv/bin/python benchmarks/kernels.py [--only decode,prefill] [--json FILE]

Bandwidth is that of a copy of 1 GiB, the rate of products that of 8,192^3 in bfloat16, both measured in the same run.
The fraction is of the bandwidth for kernels that move, of the rate for those that multiply. Times are medians by CUDA
events, each run after a write larger than the GPU's caches. Without a GPU it says so and exits with code 2.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from outputs import output_file

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # read when triton is loaded

import torch
from torch import Tensor

# Where this folder is on the path, as for every program in it, transformers takes this file for Hugging Face's package
# `kernels` and imports it: no version of that would do.
__version__ = "0"

_NUM_RUNS, _WARM_UP = 30, 5
_FLUSHED_BYTES = 2**30  # a fifth of a millisecond on an H200, which caches 50 MiB of it
_BFLOAT16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One kernel on one shape; what it must at least read, write and multiply."""

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    num_bytes: int = 0
    num_flops: int = 0


@dataclass(frozen=True)
class Row:
    """What was measured of a case."""

    name: str
    ours_us: float
    torch_us: float
    fraction: float
    of: str


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--json", type=output_file, help="write the rows to this file too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees none, and these kernels are measured on one", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    bandwidth, rate = copy_bandwidth(device), product_rate(device)
    print(
        f"{torch.cuda.get_device_name(device)}: copy {bandwidth / 1e9:,.0f} GB/s, products {rate / 1e12:,.0f} TFLOP/s\n"
    )
    print("| kernel | ours, µs | torch, µs | torch / ours | achieved |\n|---|---|---|---|---|")
    rows = []
    for case in cases(device):
        if not any(part in case.name for part in arguments.only.split(",")):
            continue
        row = measured(case, bandwidth, rate)
        rows.append(row)
        ratio = row.torch_us / row.ours_us
        print(
            f"| {row.name} | {row.ours_us:,.1f} | {row.torch_us:,.1f} | {ratio:.2f} | {row.fraction:.0%} of {row.of} |",
            flush=True,
        )
    if arguments.json is not None:
        facts = {"gpu": torch.cuda.get_device_name(device), "bytes_per_s": bandwidth, "flops": rate}
        arguments.json.write_text(json.dumps(facts | {"rows": [asdict(row) for row in rows]}, indent=1))
    return 0


def measured(case: Case, bandwidth: float, rate: float) -> Row:
    """Measure both; the limit is the slower of moving and multiplying."""
    ours, theirs = seconds(case.ours), seconds(case.theirs)
    moving, multiplying = case.num_bytes / bandwidth, case.num_flops / rate
    of = "bandwidth" if moving >= multiplying else "products"
    return Row(case.name, 1e6 * ours, 1e6 * theirs, max(moving, multiplying) / ours, of)


def seconds(run: Callable[[], Any]) -> float:
    """Return the median time on the GPU.

    Between runs the caches are overwritten: no run finds there what the one before left, and while the GPU writes, the
    host launches what is measured, so that no launch is.
    """
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(_WARM_UP):
        run()
    times = []
    for _ in range(_NUM_RUNS):
        flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes read and written a second by a copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def product_rate(device: torch.device) -> float:
    """Return operations a second of a large matrix product."""
    size = 8192
    left = torch.randn(size, size, device=device, dtype=_BFLOAT16)
    return 2 * size**3 / seconds(lambda: left @ left)


def cases(device: torch.device) -> Iterator[Case]:
    """Yield every kernel on shapes of an 8B model: 32 heads of 128, 8 KV heads, hidden size 4,096."""
    for kv_dtype in (_BFLOAT16, torch.int8, torch.float8_e4m3fn):
        yield from attention_cases(device, kv_dtype)
    yield from move_cases(device)
    yield from row_cases(device)
    yield from product_cases(device)
    yield sampling_case(device)


def attention_cases(device: torch.device, kv_dtype: torch.dtype) -> Iterator[Case]:
    from pdserve.kernels.attention import AttentionSpan, paged_attention
    from pdserve.kernels.decode_attention import DecodeBatch
    from pdserve.kernels.kv_rows import pack_rows
    from pdserve.kernels.kv_store import store_kv as store_reference
    from pdserve.kernels.prefill_attention import PrefillBatch
    from pdserve.kernels.triton.decode_attention import decode_attention
    from pdserve.kernels.triton.kv_store import store_kv
    from pdserve.kernels.triton.prefill_attention import prefill_attention

    num_seqs, context_len, block_size, scale = 32, 4096, 16, 128**-0.5
    num_blocks = num_seqs * context_len // block_size
    values = torch.randn(num_blocks, 2, 8, block_size, 128, device=device, dtype=_BFLOAT16)
    kv_blocks = pack_rows(values, kv_dtype)
    tables = torch.randperm(num_blocks, device=device).view(num_seqs, -1)
    name = str(kv_dtype).removeprefix("torch.")
    query = torch.randn(num_seqs, 32, 128, device=device, dtype=_BFLOAT16)
    lens = torch.full((num_seqs,), context_len, dtype=torch.int32, device=device)
    batch = DecodeBatch(tables.to(torch.int32), lens, context_len)
    spans = [AttentionSpan(index, 1, context_len, tables[index]) for index in range(num_seqs)]
    yield Case(
        f"decode attention, {num_seqs} x {context_len:,}, cache {name}",
        lambda: decode_attention(query, kv_blocks, batch, scale),
        lambda: paged_attention(query, kv_blocks, spans, scale),
        num_bytes=kv_blocks.numel() * kv_blocks.element_size(),
    )
    chunk = torch.randn(2048, 32, 128, device=device, dtype=_BFLOAT16)
    tiles = PrefillBatch.of(tables[:1].to(torch.int32), [(0, 2048, 4096)], 4, _BFLOAT16)
    span = [AttentionSpan(0, 2048, 4096, tables[0])]
    yield Case(
        f"prefill attention, 2,048 after 2,048, cache {name}",
        lambda: prefill_attention(chunk, kv_blocks, tiles, scale),
        lambda: paged_attention(chunk, kv_blocks, span, scale),
        num_flops=4 * 32 * 128 * sum(range(2049, 4097)),
    )
    keys, slots = chunk[:, :8], torch.randperm(num_blocks * block_size, device=device)[:2048]
    written = 2 * 2048 * 8 * kv_blocks.shape[-1] * kv_blocks.element_size()
    yield Case(
        f"KV store, 2,048 tokens, cache {name}",
        lambda: store_kv(keys, keys, kv_blocks, slots),
        lambda: store_reference(keys, keys, kv_blocks, slots),
        num_bytes=2 * 2048 * 8 * 128 * 2 + written,
    )


def move_cases(device: torch.device) -> Iterator[Case]:
    import pdserve.kernels.block_copy as reference
    from pdserve.kernels.triton.block_copy import copy_blocks, gather_blocks, scatter_blocks

    blocks = torch.randn(256, 32, 2, 8, 16, 128, device=device).to(_BFLOAT16)  # 2 MiB each
    sources, targets = torch.randperm(256, device=device).chunk(2)
    size = 128 * blocks[0].numel() * 2
    staged = blocks[sources]
    for dtype, num_bytes in ((_BFLOAT16, 2 * size), (torch.int8, size + size * 132 // 256)):
        yield Case(
            f"gather of 128 blocks of 2 MiB into {str(dtype).removeprefix('torch.')}",
            lambda chosen=dtype: gather_blocks(blocks, sources, chosen),
            lambda chosen=dtype: reference.gather_blocks(blocks, sources, chosen),
            num_bytes=num_bytes,
        )
    yield Case(
        "scatter of 128 blocks of 2 MiB",
        lambda: scatter_blocks(staged, blocks, sources),
        lambda: reference.scatter_blocks(staged, blocks, sources),
        num_bytes=2 * size,
    )
    yield Case(
        "copy of 128 blocks of 2 MiB before writing",
        lambda: copy_blocks(blocks, sources, targets),
        lambda: reference.copy_blocks(blocks, sources, targets),
        num_bytes=2 * size,
    )


def row_cases(device: torch.device) -> Iterator[Case]:
    import pdserve.kernels.activation as activation_reference
    import pdserve.kernels.rms_norm as norm_reference
    import pdserve.kernels.rope as rope_reference
    from pdserve.kernels.activation import Activation
    from pdserve.kernels.triton.activation import gated_activation
    from pdserve.kernels.triton.rms_norm import add_rms_norm, rms_norm
    from pdserve.kernels.triton.rope import apply_rope

    rows = torch.randn(2048, 4096, device=device, dtype=_BFLOAT16)
    weight, size = rows[0].clone(), 2 * rows.numel()
    yield Case(
        "RMS norm, 2,048 x 4,096",
        lambda: rms_norm(rows, weight, 1e-5),
        lambda: norm_reference.rms_norm(rows, weight, 1e-5),
        num_bytes=2 * size,
    )
    yield Case(
        "RMS norm of a sum, 2,048 x 4,096",
        lambda: add_rms_norm(rows, rows, weight, 1e-5),
        lambda: norm_reference.add_rms_norm(rows, rows, weight, 1e-5),
        num_bytes=3 * size,  # the sum's two parts are the same memory here
    )
    heads = torch.randn(2048, 40, 128, device=device, dtype=_BFLOAT16)
    angles = torch.randn(2048, 64, device=device, dtype=_BFLOAT16)
    yield Case(
        "rope, 2,048 x 40 heads of 128",
        lambda: apply_rope(heads, angles, angles),
        lambda: rope_reference.apply_rope(heads, angles, angles),
        num_bytes=4 * heads.numel(),
    )
    gate_up = torch.randn(2048, 2 * 14_336, device=device, dtype=_BFLOAT16)
    yield Case(
        "SiLU times up, 2,048 x 14,336",
        lambda: gated_activation(gate_up, Activation.SILU),
        lambda: activation_reference.gated_activation(gate_up, Activation.SILU),
        num_bytes=3 * gate_up.numel(),
    )


def product_cases(device: torch.device) -> Iterator[Case]:
    from pdserve.kernels.int8_linear import Int8Weight
    from pdserve.kernels.linear import linear as reference
    from pdserve.kernels.triton.linear import linear

    weight = torch.randn(14_336, 4096, device=device, dtype=_BFLOAT16)
    packed = Int8Weight.of(weight)
    int8 = Int8Weight(packed.values.to(device), packed.scales.to(device))
    for num_rows in (16, 2048):
        rows = torch.randn(num_rows, 4096, device=device, dtype=_BFLOAT16)
        flops, moved = 2 * num_rows * weight.numel(), 2 * num_rows * (4096 + 14_336)
        yield Case(
            f"product, {num_rows:,} rows, fixed tiles",
            lambda given=rows: linear(given, weight, None, is_batch_invariant=True),
            lambda given=rows: torch.nn.functional.linear(given, weight),
            num_bytes=moved + 2 * weight.numel(),
            num_flops=flops,
        )
        yield Case(
            f"product, {num_rows:,} rows, weights int8",
            lambda given=rows: linear(given, int8, None),
            lambda given=rows: reference(given, int8, None),
            num_bytes=moved + weight.numel(),
            num_flops=flops,
        )


def sampling_case(device: torch.device) -> Case:
    from pdserve.kernels.sampling import RowRequest
    from pdserve.kernels.triton.sampling import SampledRows

    num_rows, vocab_size = 64, 128_256
    logits = torch.randn(num_rows, vocab_size, device=device) * 3
    requests = [RowRequest(temperature=0.8, top_k=50, top_p=0.95, seed=row) for row in range(num_rows)]
    rows = SampledRows.of(requests, vocab_size, device)

    def theirs() -> Tensor:
        values, token_ids = torch.topk(logits / 0.8, 50)
        weights = torch.softmax(values, 1)
        kept = weights.masked_fill(weights.cumsum(1) - weights >= 0.95, 0.0)
        return token_ids.gather(1, torch.multinomial(kept, 1))

    return Case(
        f"sampling with top-k and top-p, {num_rows} x {vocab_size:,}",
        lambda: rows.sample(logits),
        theirs,
        num_bytes=4 * logits.numel(),
    )


if __name__ == "__main__":
    sys.exit(main())
