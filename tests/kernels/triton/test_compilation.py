"""Kernels compiled to machine code of a GPU that is not here: the compiler refuses what the interpreter runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pdserve.kernels.triton as package

_ROOT = Path(__file__).parents[3]
SCRIPT = _ROOT / "benchmarks" / "compile_kernels.py"
_LAUNCHED = {
    name
    for path in Path(package.__path__[0]).glob("*.py")
    for name in re.findall(r"^ +(\w+)\[\(", path.read_text(), re.MULTILINE)
}


@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_every_target(tmp_path: Path) -> None:
    """In its first variant; `benchmarks/compile_kernels.py` has all, and docs/kernels.md its table."""
    rows = _compiled(tmp_path, "--first")

    assert set(rows) == set(_rows((_ROOT / "docs" / "kernels.md").read_text())) == _LAUNCHED
    assert {len(cells) for variants in rows.values() for cells in variants} == {4}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("target", "kernel"), [("sm_80", "attend_part"), ("sm_90", "attend_rows"), ("gfx942", "attend_part")]
)
def test_attention_compiles_in_every_shape(tmp_path: Path, target: str, kernel: str) -> None:
    assert set(_compiled(tmp_path, "--targets", target, "--kernels", kernel)) == {kernel}


_STEPS = """
import torch
from compile_kernels import recorded
from pdserve.kernels.decode_attention import DecodeBatch
from pdserve.kernels.prefill_attention import PrefillBatch
from pdserve.kernels.triton.decode_attention import decode_attention
from pdserve.kernels.triton.linear import linear
from pdserve.kernels.triton.prefill_attention import prefill_attention

kv_blocks, weight = torch.zeros(2, 2, 8, 16, 128), torch.zeros(48, 64)
for num_seqs, context_len in ((1, 1), (1, 100_000), (2, 300), (3, 5000), (9, 40_000), (16, 256), (64, 130_000)):
    query = torch.zeros(num_seqs, 32, 128)
    tables = torch.zeros(num_seqs, -(-context_len // 16), dtype=torch.int32)
    decode = DecodeBatch(tables, torch.ones(num_seqs, dtype=torch.int64), context_len)
    prefill = PrefillBatch.of(tables[:1], [(0, num_seqs, context_len + num_seqs)], 4, torch.float32)
    with recorded() as launches:
        decode_attention(query, kv_blocks, decode, 0.1)
        prefill_attention(query, kv_blocks, prefill, 0.1)
        linear(torch.zeros(num_seqs, 64), weight, None, is_batch_invariant=True)
    for launch in launches:
        print(launch.kernel.__name__, launch.source().hash())
"""


def test_steps_of_other_sizes_need_no_other_compilation() -> None:
    """What a GPU compiles while it serves keeps every stream waiting."""
    command = [sys.executable, "-c", _STEPS]

    result = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True, timeout=300, check=False)

    assert result.returncode == 0, result.stderr
    kernels = [line.split()[0] for line in set(result.stdout.splitlines())]
    assert sorted(kernels) == ["attend_part", "attend_rows", "merge_parts", "multiply"]


def _compiled(cache: Path, *options: str) -> dict[str, list[list[int]]]:
    command = [sys.executable, str(SCRIPT), *options]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}

    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880, check=False)

    assert result.returncode == 0, result.stderr
    rows = _rows(result.stdout)
    assert all(0 < each <= 512 for variants in rows.values() for cells in variants for each in cells)
    return rows


def _rows(table: str) -> dict[str, list[list[int]]]:
    """Return the registers of each target, for each variant of each kernel."""
    rows: dict[str, list[list[int]]] = {}
    for name, cells in re.findall(r"^\| `(\w+)` \|[^|]+\|(.*)$", table, re.MULTILINE):
        rows.setdefault(name, []).append([int(each) for each in re.findall(r"(\d+) / [\d,]+", cells)])
    return rows


def test_a_target_that_is_not_known_is_refused() -> None:
    command = [sys.executable, str(SCRIPT), "--targets", "sm_12"]

    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    assert result.returncode == 2
    assert "no target sm_12" in result.stderr
