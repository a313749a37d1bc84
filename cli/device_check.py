"""Whether the GPU that a node is told to compute on can be there at all, asked before anything slow is started.

Only torch knows for certain, and takes seconds to load; what is refused here it would refuse too.
"""

import ast
import ctypes
from importlib.util import find_spec
from pathlib import Path

from pdserve.cli.errors import SettingError

_NVIDIA_DRIVER = "libcuda.so.1"  # the one way by which torch reaches a GPU of NVIDIA's


def check_device(name: str) -> None:
    """Look at what the device `name` needs.

    Raises:
        SettingError: it is a GPU, and torch is built for none or NVIDIA's driver is not installed.
    """
    if not name.startswith("cuda"):
        return
    torch = find_spec("torch")  # without loading it
    if torch is None or torch.origin is None:
        return
    missing = missing_for_gpu(Path(torch.origin).with_name("version.py"), _NVIDIA_DRIVER)
    if missing is not None:
        raise SettingError(f"--device: {name!r} is not there: {missing}; give cpu, or auto to use a GPU where one is")


def missing_for_gpu(version_file: Path, driver: str) -> str | None:
    """Return what keeps torch, whose `version_file` says what it is built for, from every GPU; None if nothing does or
    that cannot be told.
    """
    try:
        built = _constants(version_file.read_text())
    except (OSError, SyntaxError, ValueError):
        return None
    if "cuda" not in built or built.get("hip") is not None:  # ROCm is called cuda too, and has another driver
        return None
    if built["cuda"] is None:
        return f"torch {built.get('__version__')} is built without CUDA"
    try:
        ctypes.CDLL(driver)
    except OSError:
        return f"NVIDIA's driver ({driver}) is not installed"
    return None


def _constants(source: str) -> dict[str, object]:
    """Return the names that are set to constants at the top of a module."""
    found: dict[str, object] = {}
    for line in ast.parse(source).body:
        if not isinstance(line, ast.Assign | ast.AnnAssign) or not isinstance(line.value, ast.Constant):
            continue
        for target in line.targets if isinstance(line, ast.Assign) else [line.target]:
            if isinstance(target, ast.Name):
                found[target.id] = line.value.value
    return found
