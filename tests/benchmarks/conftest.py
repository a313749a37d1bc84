"""The modules of benchmarks/, which are scripts and no part of the package."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

_FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import modules of benchmarks/ by their names there; they are forgotten after the test."""
    monkeypatch.syspath_prepend(str(_FOLDER))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(_FOLDER)):
            del sys.modules[name]
    sys.modules.pop("peers", None)
