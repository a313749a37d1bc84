"""kvtransfer stands alone: others can use it without the engine and without torch."""

import subprocess
import sys

import pdserve.kvtransfer

FOREIGN = ("torch", "numpy", "transformers", "redis", "aiohttp")
PARTS = ("engine", "control", "kernels", "gateway", "cli", "prefill_node", "decode_node")


def test_importing_it_imports_nothing_of_the_engine(tmp_path):
    program = "import sys, pdserve.kvtransfer; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30, cwd=tmp_path
    )

    loaded = set(result.stdout.split())
    assert "pdserve.kvtransfer.receiver" in loaded
    assert not loaded & {*FOREIGN, *(f"pdserve.{part}" for part in PARTS)}


def test_every_public_name_exists():
    for name in pdserve.kvtransfer.__all__:
        assert getattr(pdserve.kvtransfer, name) is not None
