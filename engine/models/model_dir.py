"""What a Hugging Face model directory says besides its weights: config, end-of-sequence ids, vocabulary, identity."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from pdserve.engine.errors import ModelError
from pdserve.engine.kv_shape import text_fields
from pdserve.engine.models.weights import WeightFiles

_CHUNK_BYTES = 1 << 24
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class ModelDir:
    """A directory that holds config.json, weights and tokenizer files."""

    path: Path
    config: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> "ModelDir":
        """Read config.json.

        Raises:
            ModelError: it is missing or not a JSON object.
        """
        config_path = path / "config.json"
        if not config_path.exists():
            raise ModelError(f"{path}: config.json is missing; give a directory in Hugging Face format")
        return cls(path, _read_object(config_path))

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.path.resolve().name

    def eos_token_ids(self) -> frozenset[int]:
        """Return the union of what config, generation config and tokenizer call the end of a sequence."""
        ids: set[int] = set()
        for source in (self.config, self._optional("generation_config.json")):
            eos = source.get("eos_token_id")
            ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
        token = self._optional("tokenizer_config.json").get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and (token_id := self._token_ids().get(content)) is not None:
            ids.add(token_id)
        return frozenset(ids)

    def num_token_ids(self) -> int:
        """Return 1 + the highest id that has a text; ids above it are padding of the vocabulary."""
        ids = self._token_ids()
        if ids:
            return max(ids.values()) + 1
        return int(text_fields(self.config)[0]["vocab_size"])

    def has_vocabulary_of(self, other: "ModelDir") -> bool:
        """Whether both tokenizers give the same id to each token."""
        return self._token_ids() == other._token_ids()

    def digest(self) -> str:
        """Return a hex digest of the config and the content of every weight file: the identity of the weights."""
        state = xxhash.xxh3_128()
        state.update(json.dumps(self.config, sort_keys=True).encode())
        for path in WeightFiles.open(self.path).paths:
            state.update(f"{path.name}:{path.stat().st_size};".encode())
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    state.update(chunk)
        return state.hexdigest()

    def tokenizer_digest(self) -> str:
        """Return a hex digest of which text each token id stands for."""
        state = xxhash.xxh3_128()
        for token, token_id in sorted(self._token_ids().items()):
            state.update(f"{len(token)}:{token}={token_id};".encode("utf-8", "surrogatepass"))
        return state.hexdigest()

    def revision(self) -> str | None:
        """Return the commit of the hub that the directory is a snapshot of; None for any other directory."""
        path = self.path.resolve()
        is_snapshot = path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name)
        return path.name if is_snapshot else None

    def _token_ids(self) -> dict[str, int]:
        tokenizer = self._optional("tokenizer.json")
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, list):  # Unigram: [[piece, score], ...], the id is the index
            vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
        return {**vocabulary, **added}

    def _optional(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return _read_object(path) if path.exists() else {}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return value
