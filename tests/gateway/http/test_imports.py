import subprocess
import sys

PROGRAM = """
import importlib, pathlib, pkgutil, sys
import pdserve.gateway
for module in pkgutil.iter_modules(pdserve.gateway.__path__):
    importlib.import_module(f"pdserve.gateway.{module.name}")
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.app import create_app
from pdserve.gateway.deps import Backend
from pdserve.gateway.config import HttpConfig
tokenizer = Tokenizer.load(pathlib.Path(sys.argv[1]))
backend = Backend(source=None, status=None, records=None, peers=None, quotas=None, responses=None)
create_app(HttpConfig(model_names=("m",), max_model_len=8), tokenizer, backend, None)
print(sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
"""


def test_a_gateway_never_imports_torch_or_transformers(demo_model_dir):
    command = [sys.executable, "-c", PROGRAM, str(demo_model_dir)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
