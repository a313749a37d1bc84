"""A GPU that cannot be there is refused before torch is loaded; what only torch can know is left to it."""

from pathlib import Path

import pytest

from pdserve.cli.device_check import check_device, missing_for_gpu

_BUILDS = {
    "cpu": "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n",
    "old cpu": "__version__ = '2.13.0'\ncuda = None\n",
    "cuda": "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
    "rocm": "__version__ = '2.13.0'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n",
    "unknown": "from somewhere import cuda\n",
    "broken": "cuda = = None\n",
}
_ANY_LIBRARY = "libc.so.6"


@pytest.mark.parametrize(
    ("build", "driver", "missing"),
    [
        ("cpu", _ANY_LIBRARY, "torch 2.13.0+cpu is built without CUDA"),
        ("old cpu", _ANY_LIBRARY, "torch 2.13.0 is built without CUDA"),
        ("cuda", "libno-such-driver.so.1", "NVIDIA's driver (libno-such-driver.so.1) is not installed"),
        ("cuda", _ANY_LIBRARY, None),
        ("rocm", "libno-such-driver.so.1", None),
        ("unknown", "libno-such-driver.so.1", None),
        ("broken", "libno-such-driver.so.1", None),
    ],
)
def test_what_is_missing_is_known_by_the_build_and_the_driver(
    build: str, driver: str, missing: str | None, tmp_path: Path
) -> None:
    version_file = tmp_path / "version.py"
    version_file.write_text(_BUILDS[build])

    assert missing_for_gpu(version_file, driver) == missing
    assert missing_for_gpu(tmp_path / "none.py", driver) is None


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_cpu_needs_nothing(name: str) -> None:
    check_device(name)
