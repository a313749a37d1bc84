"""What must start light does: proven in fresh interpreters, not by reading the sources."""

import subprocess
import sys

import pytest

_PROBE = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers", "triton", "numpy"}))
"""


@pytest.mark.parametrize(
    "module",
    [
        "pdserve",
        "pdserve.cli.commands",
        "pdserve.cli.main",
        "pdserve.cli.serve",
        "pdserve.engine.model_source",
        "pdserve.control.messages",
        "pdserve.engine.config",
        "pdserve.engine.tokenizer",
        "pdserve.engine.chat_template",
        "pdserve.engine.detokenizer",
        "pdserve.gateway.process",
    ],
)
def test_module_loads_without_torch(module: str) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-c", _PROBE, module], capture_output=True, text=True, timeout=170, check=False
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
