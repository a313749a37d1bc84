"""The config of a model that is named in any of the usual ways, and the size of its files; loads no weights."""

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdserve.engine.errors import ModelError
from pdserve.engine.model_source import DEMO_MODEL, HUB_ID, resolve_model

_MAX_HEADER_BYTES = 100 * 2**20  # safetensors' own limit


def find_config(spec: str, *, progress: Callable[[str], None]) -> tuple[dict[str, Any], Path | None]:
    """Return the config and, if weights lie beside it, their directory.

    `spec` is a directory, a config.json, a .gguf file, "demo", a hub id (only its config is fetched), or JSON itself.

    Raises:
        ModelError: there is no config.
    """
    if spec.lstrip().startswith("{"):
        return _object(spec, "the config"), None
    path = Path(spec).expanduser()
    if spec != DEMO_MODEL and not path.exists() and HUB_ID.fullmatch(spec):
        return _object(_hub_config(spec, progress).read_text(encoding="utf-8"), spec), None
    if spec == DEMO_MODEL or path.suffix == ".gguf":
        path = resolve_model(spec, progress=progress)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"{spec!r}: no config there; give a directory, a config.json, a .gguf file, a hub id or JSON")
    return _object(file.read_text(encoding="utf-8"), str(file)), file.parent


def stored_parameters(model_dir: Path) -> int | None:
    """Return how many values the safetensors files of a directory hold by their headers; None without such files."""
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        return None
    return sum(math.prod(shape) for file in files for shape in _shapes(file))


def _shapes(file: Path) -> list[list[int]]:
    with file.open("rb") as stream:
        prefix = stream.read(8)
        num_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        if num_bytes > _MAX_HEADER_BYTES:
            raise ModelError(f"{file}: not a safetensors file")
        header = _object(stream.read(num_bytes).decode("utf-8", "replace"), str(file))
    return [entry["shape"] for name, entry in header.items() if name != "__metadata__"]


def _hub_config(hub_id: str, progress: Callable[[str], None]) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ModelError(
            f"{hub_id!r}: fetching from the hub needs huggingface_hub; pip install 'pdserve[node]'"
        ) from error
    progress(f"fetching the config of {hub_id} from the Hugging Face hub")
    try:
        return Path(hf_hub_download(hub_id, "config.json", etag_timeout=10.0))
    except Exception as error:  # the hub client raises what its HTTP layers raise
        reason = (str(error).strip() or "no details").splitlines()[0]
        raise ModelError(
            f"{hub_id!r}: the hub did not deliver config.json ({type(error).__name__}: {reason})"
        ) from error


def _object(text: str, source: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{source}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{source}: must be a JSON object")
    return value
