"""How an engine speculates: who drafts, and how many tokens at a time. Torch-free."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path

from pdserve.engine.errors import InvalidRequest

MAX_SPECULATIVE_TOKENS = 32
_MAX_LOOKUP = 32
_LOOKUP_MAX = 4
_FIELD = "speculative_config"


class SpeculativeMethod(StrEnum):
    """Who drafts."""

    NGRAM = "ngram"  # the sequence itself: what followed its last tokens the last time
    DRAFT_MODEL = "draft_model"  # a smaller model with the same vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding (Leviathan et al. 2023; prompt lookup: Saxena 2023), with vLLM's names.

    The method is `draft_model` where a `model` is given, else `ngram`, which matches the last `prompt_lookup_max`
    tokens, then fewer, down to `prompt_lookup_min`. The draft model's own keys and values take at most
    `draft_kv_memory_bytes`. With `adaptive` an engine speculates only while it measures that this pays.
    """

    num_speculative_tokens: int = 4
    method: SpeculativeMethod = SpeculativeMethod.NGRAM
    model: str | None = None
    prompt_lookup_max: int = _LOOKUP_MAX
    prompt_lookup_min: int = 2
    draft_kv_memory_bytes: int = 256 * 2**20
    adaptive: bool = True

    def __post_init__(self) -> None:
        if (self.method is SpeculativeMethod.DRAFT_MODEL) != (self.model is not None):
            raise InvalidRequest(_FIELD, 'a "model" goes with the method "draft_model", and the other way round')
        self._check("num_speculative_tokens", 1, MAX_SPECULATIVE_TOKENS)
        self._check("prompt_lookup_max", 1, _MAX_LOOKUP)
        self._check("prompt_lookup_min", 1, self.prompt_lookup_max)
        self._check("draft_kv_memory_bytes", 2**16, 2**50)
        if not isinstance(self.adaptive, bool):
            raise InvalidRequest(_FIELD, f"adaptive must be true or false, got {self.adaptive!r}")

    @classmethod
    def from_mapping(cls, given: Mapping[str, object]) -> "SpeculativeConfig":
        """Read what users of vLLM write; `num_speculative_tokens` must be said.

        Raises:
            InvalidRequest: something is unknown, missing or out of bounds; the text names it.
        """
        values = {key: value for key, value in given.items() if value is not None}
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise InvalidRequest(_FIELD, f"unknown: {', '.join(sorted(map(repr, unknown)))}")
        if "num_speculative_tokens" not in values:
            raise InvalidRequest(_FIELD, '"num_speculative_tokens" is missing')
        if isinstance(values.get("model"), Path):
            values["model"] = str(values["model"])
        if not isinstance(values.get("model", ""), str):
            raise InvalidRequest(_FIELD, f"model must be a text, got {values['model']!r}")
        method = values.get("method", SpeculativeMethod.DRAFT_MODEL if "model" in values else SpeculativeMethod.NGRAM)
        if method not in tuple(SpeculativeMethod):
            raise InvalidRequest(_FIELD, f"method must be one of {', '.join(SpeculativeMethod)}, got {method!r}")
        most = values.get("prompt_lookup_max", _LOOKUP_MAX)
        if isinstance(most, int) and "prompt_lookup_min" not in values:
            values["prompt_lookup_min"] = max(1, min(2, most))
        return cls(**{**values, "method": SpeculativeMethod(str(method))})  # type: ignore[arg-type]  # checked there

    @classmethod
    def from_json(cls, text: str) -> "SpeculativeConfig":
        """Read a JSON object (see `from_mapping`).

        Raises:
            InvalidRequest: it is none, or says something wrong.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise InvalidRequest(_FIELD, f"is not JSON ({error})") from None
        if not isinstance(given, dict):
            raise InvalidRequest(_FIELD, "must be a JSON object")
        return cls.from_mapping(given)

    def _check(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidRequest(_FIELD, f"{name} must be a whole number between {low} and {high}, got {value!r}")
