"""Kernels compiled to machine code of a GPU that is not here: the compiler refuses what the interpreter runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "compile_kernels.py"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("target", "kernels"),
    [
        ("sm_80", "attend_part"),
        ("sm_90", "attend_rows"),
        ("sm_100", "merge_parts,store_rows,sample_row"),
        ("gfx942", "attend_part"),
    ],
)
def test_kernels_compile_for_every_target(tmp_path: Path, target: str, kernels: str) -> None:
    """Those of attention in every shape, the others in their first: `benchmarks/compile_kernels.py` has all."""
    first = [] if "attend" in kernels else ["--first"]
    command = [sys.executable, str(SCRIPT), "--targets", target, "--kernels", kernels, *first]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}

    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880, check=False)

    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) / [\d,]+", result.stdout, re.MULTILINE)
    assert {name for name, _ in rows} == set(kernels.split(","))
    assert all(0 < int(registers) <= 512 for _, registers in rows)


def test_a_target_that_is_not_known_is_refused() -> None:
    command = [sys.executable, str(SCRIPT), "--targets", "sm_12"]

    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    assert result.returncode == 2
    assert "no target sm_12" in result.stderr
