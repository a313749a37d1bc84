"""Rotary frequencies for every rope type of a Llama-like config.

default: Su et al. 2021. linear: Chen et al. 2023 (position interpolation). dynamic: NTK-aware scaling by length.
yarn: Peng et al. 2023. longrope: Ding et al. 2024. llama3: the Llama 3.1 release.

Two types make the frequencies depend on the length of the sequence. A token's keys are rotated once, with the length
that was known when it was computed: the whole prompt for prompt tokens, its own position + 1 for an output token. That
is what a run of the whole prompt followed by single steps does, and it depends neither on chunks nor on neighbours.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.errors import ModelError
from pdserve.engine.models.architectures import Architecture

_GLOBAL_THETA = 1_000_000.0  # Gemma 3, where the config leaves them out
_LOCAL_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """What a model's config says about rope, in one form for all the ways in which it can be written."""

    rope_type: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    parameters: dict[str, Any]

    @classmethod
    def all_from_config(
        cls, config: Mapping[str, Any], architecture: Architecture, head_dim: int
    ) -> tuple["RopeConfig", ...]:
        """Return the model's rotations: one, or one for full and one for sliding attention.

        Raises:
            ModelError: a rope type is unknown or lacks a parameter.
        """
        is_partial = architecture.rotates_partially
        if not architecture.rope_by_layer_type:
            return (cls.from_config(config, head_dim, is_partial),)
        nested = config.get("rope_parameters") or {}
        full = {**(nested.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
        full.setdefault("rope_theta", config.get("rope_theta") or _GLOBAL_THETA)
        sliding = dict(nested.get("sliding_attention") or {})
        sliding.setdefault("rope_theta", config.get("rope_local_base_freq") or _LOCAL_THETA)
        plain = {key: value for key, value in config.items() if key != "rope_scaling"}
        return tuple(
            cls.from_config({**plain, "rope_parameters": each}, head_dim, is_partial) for each in (full, sliding)
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int, is_partial: bool) -> "RopeConfig":
        """Read `rope_scaling` (`rope_type` or `type`) or `rope_parameters`, and `rope_theta`.

        Raises:
            ModelError: the rope type is unknown or lacks a parameter.
        """
        parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
        if rope_type == "su" or (rope_type == "yarn" and "short_factor" in parameters):
            rope_type = "longrope"  # what early Phi-3 configs called it
        if rope_type not in _REQUIRED:
            raise ModelError(f"rope type {rope_type!r} is not supported; known types: {', '.join(sorted(_REQUIRED))}")
        max_positions = int(config.get("max_position_embeddings") or 2048)
        if rope_type in ("yarn", "longrope", "llama3"):
            original = config.get("original_max_position_embeddings")
            own = parameters.get("original_max_position_embeddings")
            parameters["original_max_position_embeddings"] = int(original or own or max_positions)
        for name in _REQUIRED[rope_type]:
            if parameters.get(name) is None:
                raise ModelError(f"rope type {rope_type!r} needs the parameter {name!r}, which the config lacks")
        theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
        partial = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        rotary_dim = int(head_dim * float(partial)) if is_partial else head_dim
        return cls(rope_type, theta, rotary_dim, max_positions, parameters)

    @property
    def context_len(self) -> int:
        """Tokens that the model is meant for: the types that stretch positions do so beyond the trained length."""
        factor = float(self.parameters.get("factor") or 1.0)
        if self.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * factor)
        if self.rope_type == "yarn":
            stretched = int(self.parameters["original_max_position_embeddings"] * factor)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings


_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("long_factor", "short_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


class RotaryEmbedding:
    """Cosines and sines by position; owns a table for the positions of the usual, length-independent case."""

    def __init__(self, config: RopeConfig, max_len: int, device: torch.device) -> None:
        self._config = config
        inv_freq, self._attention_scaling = _frequencies(config, seq_len=None)
        self.length_limit = _length_limit(config)
        positions = torch.arange(max_len, dtype=torch.float32)
        self._cos, self._sin = (table.to(device) for table in self._rotations(positions, inv_freq))

    def rotations(
        self,
        positions: Tensor,  # [num_tokens] int64
        rope_lengths: Tensor,  # [num_tokens] int64: the sequence length by which each token is rotated
    ) -> tuple[Tensor, Tensor]:  # each [num_tokens, rotary_dim / 2] float32
        """Return cosines and sines, scaled by the type's attention factor."""
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        if self.length_limit is None or int(rope_lengths.max()) <= self.length_limit:
            return cos, sin
        for length in torch.unique(rope_lengths[rope_lengths > self.length_limit]).tolist():
            rows = (rope_lengths == length).to(positions.device)
            inv_freq, _ = _frequencies(self._config, seq_len=int(length))
            rotations = self._rotations(positions[rows].float().cpu(), inv_freq)
            cos[rows], sin[rows] = (table.to(cos.device) for table in rotations)
        return cos, sin

    def cache_salt(self, num_prompt_tokens: int) -> str:
        """Return what prefix sharing must be keyed by besides tokens: the length, once it changes the rotation."""
        if self.length_limit is None or num_prompt_tokens <= self.length_limit:
            return ""
        if self._config.rope_type == "longrope":  # one set of factors for every length beyond the limit
            return "rope-length:long"
        return f"rope-length:{num_prompt_tokens}"

    def _rotations(self, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None] * inv_freq[None, :]
        return angles.cos() * self._attention_scaling, angles.sin() * self._attention_scaling


class RotaryEmbeddings:
    """All rotations of a model, in the order of its config's `ropes`."""

    def __init__(self, rotations: tuple[RotaryEmbedding, ...]) -> None:
        self._rotations = rotations

    def rotations(
        self,
        positions: Tensor,  # [num_tokens] int64
        rope_lengths: Tensor,  # [num_tokens] int64
        dtype: torch.dtype,
    ) -> list[tuple[Tensor, Tensor]]:
        """Return cosines and sines of each rotation, in `dtype`."""
        found = [rotation.rotations(positions, rope_lengths) for rotation in self._rotations]
        return [(cos.to(dtype), sin.to(dtype)) for cos, sin in found]

    @property
    def length_limit(self) -> int | None:
        """The longest sequence whose rotations depend on positions alone; None if that holds for all."""
        limits = [rotation.length_limit for rotation in self._rotations if rotation.length_limit is not None]
        return min(limits, default=None)

    def cache_salt(self, num_prompt_tokens: int) -> str:
        """Return what prefix sharing must be keyed by besides tokens."""
        return "".join(rotation.cache_salt(num_prompt_tokens) for rotation in self._rotations)


def _length_limit(config: RopeConfig) -> int | None:
    if config.rope_type == "dynamic":
        return config.max_position_embeddings
    if config.rope_type == "longrope":
        return int(config.parameters["original_max_position_embeddings"])
    return None


def _frequencies(config: RopeConfig, seq_len: int | None) -> tuple[Tensor, float]:
    """Return inverse frequencies [rotary_dim / 2] float32 and the factor on cosines and sines."""
    parameters = config.parameters
    if config.rope_type == "linear":
        return _base_frequencies(config.theta, config.rotary_dim) / parameters["factor"], 1.0
    if config.rope_type == "dynamic":
        return _dynamic(config, seq_len), 1.0
    if config.rope_type == "yarn":
        return _yarn(config)
    if config.rope_type == "longrope":
        return _longrope(config, seq_len)
    if config.rope_type == "llama3":
        return _llama3(config), 1.0
    return _base_frequencies(config.theta, config.rotary_dim), 1.0


def _base_frequencies(theta: float, dim: int) -> Tensor:
    return 1.0 / _wave_bases(theta, dim)


def _wave_bases(theta: float, dim: int) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    bases: Tensor = torch.pow(theta, exponents)
    return bases


def _dynamic(config: RopeConfig, seq_len: int | None) -> Tensor:
    dim, limit, factor = config.rotary_dim, config.max_position_embeddings, config.parameters["factor"]
    length = max(seq_len or limit, limit)
    theta = config.theta * ((factor * length / limit) - (factor - 1)) ** (dim / (dim - 2))
    return _base_frequencies(theta, dim)


def _yarn(config: RopeConfig) -> tuple[Tensor, float]:
    parameters, dim = config.parameters, config.rotary_dim
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or config.max_position_embeddings / original

    def correction_dim(num_rotations: float) -> float:
        return (dim * math.log(original / (num_rotations * 2 * math.pi))) / (2 * math.log(config.theta))

    low = correction_dim(parameters.get("beta_fast") or 32)
    high = correction_dim(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    interpolated = ramp.clamp(0, 1)
    bases = _wave_bases(config.theta, dim)
    inv_freq = interpolated / (factor * bases) + (1 - interpolated) / bases
    return inv_freq, _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return mscale(parameters["mscale"]) / mscale(parameters["mscale_all_dim"])
    return mscale(1.0)


def _longrope(config: RopeConfig, seq_len: int | None) -> tuple[Tensor, float]:
    parameters = config.parameters
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or config.max_position_embeddings / original
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    name = "long_factor" if seq_len is not None and seq_len > original else "short_factor"
    stretch = torch.tensor(parameters[name], dtype=torch.float32)
    return 1.0 / (stretch * _wave_bases(config.theta, config.rotary_dim)), float(attention_factor)


def _llama3(config: RopeConfig) -> Tensor:
    parameters = config.parameters
    original = parameters["original_max_position_embeddings"]
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    inv_freq = _base_frequencies(config.theta, config.rotary_dim)
    wavelengths = 2 * math.pi / inv_freq
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    # smooth is 0 for wavelengths above original / low (interpolated), 1 below original / high (left alone)
    blended: Tensor = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    return blended
