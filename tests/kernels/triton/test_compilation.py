"""Kernels compiled to machine code of a GPU that is not here: the compiler refuses what the interpreter runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "compile_kernels.py"


@pytest.mark.timeout(600)
def test_kernels_compile_for_sm_90(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--targets", "sm_90", "--kernels", "merge_parts,store_rows", "--first"]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}

    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)

    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) / [\d,]+", result.stdout, re.MULTILINE)
    assert {name for name, _ in rows} == {"merge_parts", "store_rows"}
    assert all(0 < int(registers) <= 255 for _, registers in rows)
