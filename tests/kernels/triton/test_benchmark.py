"""The benchmark of the kernels where there is nothing to measure."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "kernels.py"


@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which it is run elsewhere")
def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    result = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=280, check=False)

    assert result.returncode == 2
    assert result.stderr.startswith("no GPU: ") and result.stderr.count("\n") == 1
    assert result.stdout == ""
