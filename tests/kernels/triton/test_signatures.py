"""Each Triton kernel is called as its torch reference: the function of the same name in the module of the same name."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

import pdserve.kernels.triton as package

_NO_KERNELS = {"__init__", "attention_tile", "operations", "row_sampler", "rows"}  # they are made of, or made from them
_MODULES = sorted({path.stem for path in Path(package.__path__[0]).glob("*.py")} - _NO_KERNELS)


@pytest.mark.parametrize("module_name", _MODULES)
def test_a_reference_has_the_same_parameters(module_name: str) -> None:
    ours, reference = (import_module(f"pdserve.kernels.{each}") for each in (f"triton.{module_name}", module_name))
    launchers = {
        name: function
        for name, function in vars(ours).items()
        if inspect.isfunction(function) and function.__module__ == ours.__name__ and not name.startswith("_")
    }

    assert launchers
    for name, function in launchers.items():
        assert inspect.signature(function) == inspect.signature(getattr(reference, name)), name
