"""Who sees a GPU: the tests marked `gpu` when they are asked for, and nobody else on any machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "0", reason="a GPU was asked for")
def test_other_tests_see_no_gpu() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available()


@pytest.mark.timeout(300)
def test_those_that_launch_kernels_are_marked_where_a_gpu_is_asked_for() -> None:
    pytest.importorskip("triton")
    command = [
        str(Path(sys.executable).with_name("pytest")),
        "-m",
        "gpu",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    files = ["tests/gpu/test_engine_on_gpu.py", "tests/kernels/triton/test_linear.py"]

    result = subprocess.run(
        [*command, *files, "tests/kernels/triton/test_signatures.py"],
        cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip

    assert result.returncode == 0, result.stdout + result.stderr
    assert {line.partition("::")[0] for line in result.stdout.splitlines() if "::" in line} == set(files)
