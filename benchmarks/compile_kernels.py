"""Every Triton kernel compiled ahead of time, without a GPU, for sm_80, sm_90, sm_100 and gfx942.

    .venv/bin/python benchmarks/compile_kernels.py [--targets sm_80,gfx942] [--kernels attend_part,store_rows] [--first]

The launchers themselves are called, on small tensors of the CPU, and what they would launch is compiled with the
specialisation that a launch would have. Prints a Markdown table: registers a thread, bytes of shared memory a
program and, where there are any, bytes of stack a thread, as the assembler reports them. Fails if a kernel wants more
shared memory than a program can have on its target: it would compile, and not launch.
"""

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # read when triton is loaded

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from pdserve.kernels.activation import Activation
from pdserve.kernels.decode_attention import DecodeBatch
from pdserve.kernels.int8_linear import Int8Weight
from pdserve.kernels.kv_rows import row_elements
from pdserve.kernels.logit_edits import LogitEdits
from pdserve.kernels.prefill_attention import PrefillBatch
from pdserve.kernels.rope import RopeLayout
from pdserve.kernels.sampling import RowRequest
from pdserve.kernels.seen_tokens import SeenTokens
from pdserve.kernels.triton.activation import gated_activation
from pdserve.kernels.triton.block_copy import copy_blocks, gather_blocks
from pdserve.kernels.triton.decode_attention import decode_attention
from pdserve.kernels.triton.kv_store import store_kv
from pdserve.kernels.triton.linear import linear
from pdserve.kernels.triton.prefill_attention import prefill_attention
from pdserve.kernels.triton.rms_norm import add_rms_norm, rms_norm
from pdserve.kernels.triton.rope import apply_rope
from pdserve.kernels.triton.sampling import sample_rows

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}  # at most
_ALIGNMENT = 16
_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
    torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1", torch.float8_e4m3fn: "fp8",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """What a launcher would have run."""

    kernel: Any
    arguments: dict[str, Any]
    num_warps: int

    def source(self) -> ASTSource:
        """Return the kernel with the types and the specialisation of its arguments."""
        signature, constants, attributes = {}, {}, {}
        for index, (parameter, value) in enumerate(zip(self.kernel.params, self.arguments.values(), strict=True)):
            name, is_specialized = parameter.name, not parameter.do_not_specialize
            if parameter.is_constexpr or (is_specialized and isinstance(value, int) and value == 1):
                signature[name], constants[name] = "constexpr", value
                continue
            signature[name] = _type_of(value)
            is_aligned = value.data_ptr() % _ALIGNMENT == 0 if isinstance(value, Tensor) else _is_multiple(value)
            if is_aligned and is_specialized:
                attributes[(index,)] = [["tt.divisibility", _ALIGNMENT]]
        return ASTSource(self.kernel, signature, constants, attributes)


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _is_multiple(value: Any) -> bool:
    return isinstance(value, int) and value % _ALIGNMENT == 0


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record what is launched instead of launching it."""
    launches: list[Launch] = []

    def run(kernel: Any, *positional: Any, grid: Any, warmup: bool, num_warps: int, **named: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        given = dict(zip(names, positional, strict=False)) | named
        launches.append(Launch(kernel, {name: given[name] for name in names}, num_warps))

    original = JITFunction.run
    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


def examples() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield variants and the calls that launch them: usual shapes, both formats of the cache."""
    for head_dim, dtype, kv_dtype in (
        (64, torch.bfloat16, torch.bfloat16),
        (128, torch.bfloat16, torch.bfloat16),
        (128, torch.bfloat16, torch.int8),
        (128, torch.bfloat16, torch.float8_e4m3fn),
        (256, torch.float16, torch.float16),
        (256, torch.float32, torch.float32),
        (80, torch.float32, torch.float32),
    ):
        yield from _attention_examples(head_dim, dtype, kv_dtype)
    yield from _other_examples(torch.bfloat16)


def _other_examples(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    rows, ids = torch.zeros(32, 4096, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    heads, angles = torch.zeros(32, 40, 128, dtype=dtype), torch.zeros(32, 64, dtype=dtype)
    blocks, int8 = torch.zeros(8, 2, 2, 8, 16, 128, dtype=dtype), Int8Weight.of(torch.zeros(128, 4096))
    name = _TYPES[dtype]
    yield f"4,096, {name}", lambda: rms_norm(rows, rows[0], 1e-6)
    yield f"4,096, {name}, residual", lambda: add_rms_norm(rows, rows, rows[0].float(), 1e-6)
    for layout in RopeLayout:
        yield f"40 heads of 128, {name}, {layout}", lambda chosen=layout: apply_rope(heads, angles, angles, chosen)
    for activation in Activation:
        yield f"{activation}, {name}", lambda chosen=activation: gated_activation(rows, chosen)
    yield f"16 rows, {name}, weights i8", lambda: linear(rows[:16], int8, None)
    yield f"64 rows, {name}, weights i8", lambda: linear(rows, int8, None)
    yield f"64 rows, {name}", lambda: linear(rows, rows, None)
    yield "any dtype", lambda: copy_blocks(blocks, ids, ids)
    yield f"{name} to i8", lambda: gather_blocks(blocks, ids, torch.int8)
    yield f"i8 to {name}", lambda: gather_blocks(gather_blocks(blocks, ids, torch.int8), ids, dtype)
    yield f"{name} to fp8", lambda: gather_blocks(blocks, ids, torch.float8_e4m3fn)
    logits, edits = torch.zeros(4, 128_000), LogitEdits(((1, 0.5),), SeenTokens((1, 2)))
    yield "vocabulary of any size", lambda: sample_rows(logits, [RowRequest()] * 4)
    yield "vocabulary of any size, edits", lambda: sample_rows(logits, [RowRequest(edits=edits)] * 4)


def _attention_examples(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], Any]]]:
    is_usual = head_dim == 128 and kv_dtype is torch.bfloat16
    name = f"head_dim {head_dim}, {_TYPES[dtype]}, cache {_TYPES[kv_dtype]}"
    query = torch.zeros(4, 32, head_dim, dtype=dtype)
    key = torch.zeros(4, 8, head_dim, dtype=dtype)
    kv_blocks = torch.zeros(8, 2, 8, 16, row_elements(head_dim, kv_dtype), dtype=kv_dtype)
    tables = torch.zeros(4, 2, dtype=torch.int32)
    decode = DecodeBatch(tables, torch.ones(4, dtype=torch.int32), 17)
    prefill = PrefillBatch.of(tables[:1], [(0, 4, 17)], 4, dtype)
    yield name, lambda: decode_attention(query, kv_blocks, decode, 0.1)
    yield name, lambda: prefill_attention(query, kv_blocks, prefill, 0.1)
    yield name, lambda: store_kv(key, key, kv_blocks, torch.zeros(4, dtype=torch.int64))
    if not is_usual:
        return
    every, slopes = f"{name}, window, soft cap, ALiBi", torch.ones(32)
    yield every, lambda: decode_attention(query, kv_blocks, decode, 0.1, 32, 30.0, slopes)
    yield every, lambda: prefill_attention(query, kv_blocks, prefill, 0.1, 32, 30.0, slopes)


def resources(compiled: Any, target: GPUTarget) -> tuple[int, int, int]:
    """Return registers a thread, shared bytes a program, spilled bytes a thread."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s*(\d+)", text)
        return registers, compiled.metadata.shared, _number(r"\.private_segment_fixed_size:\s*(\d+)", text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return _number(r"REG:(\d+)", text), compiled.metadata.shared, _number(r"STACK:(\d+)", text)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in what the assembler says")
    return int(found.group(1))


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--kernels", help="names, separated by commas; by default all")
    parser.add_argument("--first", action="store_true", help="only the first variant of each kernel")
    arguments = parser.parse_args()
    targets = arguments.targets.split(",")
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    wanted = set(arguments.kernels.split(",")) if arguments.kernels else None
    print(f"| kernel | variant | {' | '.join(targets)} |\n|---|---|{'---|' * len(targets)}")
    seen: set[str] = set()
    too_large: list[str] = []
    for variant, call in examples():
        with recorded() as launches:
            call()
        for launch in launches:
            name = launch.kernel.__name__
            source = launch.source()
            key = name if arguments.first else source.hash()
            if (wanted is not None and name not in wanted) or key in seen:
                continue
            seen.add(key)
            cells = []
            for each in targets:
                compiled = triton.compile(source, target=TARGETS[each], options={"num_warps": launch.num_warps})
                registers, shared, spilled = resources(compiled, TARGETS[each])
                cells.append(f"{registers} / {shared:,}" + (f" / {spilled}" if spilled else ""))
                if shared > _SHARED_BYTES[each]:
                    too_large.append(f"{name} ({variant}) takes {shared:,} bytes of shared memory on {each}")
            print(f"| `{name}` | {variant} | {' | '.join(cells)} |", flush=True)
    if too_large:
        raise SystemExit("\n".join(too_large))


if __name__ == "__main__":
    main()
