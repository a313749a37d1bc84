"""The sampling that a model's authors recommend (generation_config.json): what holds where a request says nothing."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pdserve.engine.errors import InvalidRequest, ModelError
from pdserve.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values of `SamplingParams` by the same names; None where the model recommends nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def load(cls, model_dir: Path) -> "SamplingDefaults":
        """Read the model's recommendation; nothing where there is no such file.

        Raises:
            ModelError: it recommends what no request may ask for.
        """
        path = model_dir / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{path} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ModelError(f"{path} is not a JSON object")
        defaults = cls(**{field.name: content.get(field.name) for field in fields(cls)})
        try:
            SamplingParams(**defaults.values())
        except InvalidRequest as error:
            raise ModelError(f"{path}: {error}; correct it, or serve with --generation-config none") from error
        return defaults

    def values(self) -> dict[str, Any]:
        """Return the recommended values by name."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in given.items() if value is not None}
