"""Weights of a decoder from safetensors files, each parameter checked: all needed, none unknown, right shapes.

What is used as it is stored stays mapped from disk. What is stacked or converted is copied through a mapping of its
own, dropped at once, so that loading never holds much more than the model.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pdserve.engine.errors import ModelError
from pdserve.engine.models.architectures import HeadNorm, MlpNames, Norm
from pdserve.engine.models.decoder_config import DecoderConfig, ExpertsShape
from pdserve.engine.models.layer_weights import (
    DecoderWeights,
    ExpertsWeights,
    LayerWeights,
    LinearWeights,
    MlpWeights,
    NormWeights,
)
from pdserve.engine.models.refusals import refuse_modalities
from pdserve.kernels.fused_layer import Weight
from pdserve.kernels.operations import Operations
from pdserve.kernels.packed_weight import PackedWeight

_PREFIXES = ("model.", "language_model.model.", "model.language_model.")  # the later two: text parts
_LM_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_CPU = torch.device("cpu")
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


class WeightFiles:
    """The tensors of a model directory by name: the shards that the index names, or model.safetensors alone."""

    def __init__(self, file_by_name: dict[str, Path]) -> None:
        self._file_by_name = file_by_name

    @classmethod
    def open(cls, model_dir: Path) -> "WeightFiles":
        """Find the weight files.

        Raises:
            ModelError: there are none, or a shard or tensor that the index names is missing.
        """
        index = model_dir / "model.safetensors.index.json"
        if index.exists():
            return cls(_read_index(index))
        single = model_dir / "model.safetensors"
        if not single.exists():
            raise ModelError(f"{model_dir}: neither model.safetensors nor model.safetensors.index.json is there")
        return cls(dict.fromkeys(_names_in(single), single))

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._file_by_name)

    @property
    def paths(self) -> list[Path]:
        """The files in use, sorted."""
        return sorted(set(self._file_by_name.values()))

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._file_by_name[name]


def load_decoder_weights(
    files: WeightFiles,
    config: DecoderConfig,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None = None,
    operations: Operations | None = None,
    device: torch.device = _CPU,
) -> DecoderWeights:
    """Read, convert and stack every parameter on `device`; `on_progress(num_read, num_tensors)` is told of each.

    Each matrix of a linear layer is laid out as `operations` want it; without them it is left as it is.

    Raises:
        ModelError: a parameter is missing, unknown or of another shape than the config says.
    """
    refuse_modalities(config.model_type, files.names)
    take = _Taker(files, dtype, on_progress, operations, device)
    prefix = next((each for each in _PREFIXES if f"{each}embed_tokens.weight" in files.names), _PREFIXES[0])
    embedding_name, shape = f"{prefix}embed_tokens.weight", (config.vocab_size, config.hidden_size)
    head_name = _lm_head_name(take, config, embedding_name)
    lm_head = take.packed(head_name or embedding_name, shape)
    embedding = _embedding(take, lm_head, embedding_name, shape, is_tied=head_name is None)
    layers = []
    for index in range(config.num_layers):
        layers.append(_layer(take, config, f"{prefix}layers.{index}.", config.layers[index].has_experts))
    final_norm = _norm(take, config, f"{prefix}norm")
    if unknown := take.untaken():
        raise ModelError(f"unknown parameters, refusing to serve without them: {', '.join(unknown[:5])}")
    return DecoderWeights(embedding, tuple(layers), final_norm, lm_head)


def _embedding(take: "_Taker", lm_head: Weight, name: str, shape: tuple[int, int], *, is_tied: bool) -> Weight:
    """The embedding: the head's own matrix where they are one, unless that was rounded to 8 bits."""
    if not isinstance(lm_head, Tensor | PackedWeight):
        return take.as_stored(name, shape)  # mapped: only the rows that occur are ever read
    return lm_head if is_tied else take(name, shape)


class _Taker:
    """Takes parameters out of the files, so that what is left over is known."""

    def __init__(
        self,
        files: WeightFiles,
        dtype: torch.dtype,
        on_progress: Callable[[int, int], None] | None,
        operations: Operations | None,
        device: torch.device,
    ) -> None:
        self._files = files
        self._device = device
        self._dtype = dtype
        self._operations = operations
        self._on_progress = on_progress
        self._names = {name for name in files.names if not name.endswith(_IGNORED_SUFFIXES)}
        self._taken: set[str] = set()
        self._kept = _OpenShards(files)

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return one parameter: mapped if stored in the dtype wanted, else converted."""
        tensor = self._get(self._kept, name, shape)
        wanted = dtype or self._dtype
        if tensor.dtype == wanted:
            return tensor.to(self._device)
        return self._get(_OpenShards(self._files), name, shape).to(self._device, wanted)

    def as_stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return one parameter, mapped, whatever its dtype."""
        return self._get(self._kept, name, shape).to(self._device)

    def packed(self, name: str, shape: tuple[int, ...]) -> Weight:
        """Return the matrix of a linear layer: mapped, unless it is to be laid out anew."""
        if self._operations is None:
            return self(name, shape)
        return self._operations.pack(self._get(_OpenShards(self._files), name, shape).to(self._device, self._dtype))

    def open_shards(self) -> "_OpenShards":
        """Return a mapping of the files for several calls of `unrounded`: it goes when the caller drops it."""
        return _OpenShards(self._files)

    def unrounded(self, names: list[str], out_features: list[int], in_features: int, shards: "_OpenShards") -> Weight:
        """Return a matrix, or several stacked along their outputs, laid out for linear layers but never in 8 bits."""
        weight = self.stack([f"{name}.weight" for name in names], out_features, (in_features,), shards)
        return weight if self._operations is None else self._operations.pack_unrounded(weight)

    def stack(
        self,
        names: list[str],
        out_features: list[int],
        in_features: tuple[int, ...],
        shards: "_OpenShards | None" = None,
    ) -> Tensor:
        """Return the named parameters, each [out_features, *in_features], along their first dimension."""
        stacked = torch.empty((sum(out_features), *in_features), dtype=self._dtype, device=self._device)
        shards = shards or _OpenShards(self._files)
        for name, size, part in zip(names, out_features, torch.split(stacked, out_features), strict=True):
            part.copy_(self._get(shards, name, (size, *in_features)))
        return stacked

    def linear(self, names: list[str], out_features: list[int], in_features: int, has_bias: bool) -> LinearWeights:
        """Return the named projections, stacked along their outputs if they are several."""
        weight: Weight
        if len(names) == 1:
            weight = self.packed(f"{names[0]}.weight", (out_features[0], in_features))
        else:
            weight = self.stack([f"{name}.weight" for name in names], out_features, (in_features,))
            weight = weight if self._operations is None else self._operations.pack(weight)
        bias = self.stack([f"{name}.bias" for name in names], out_features, ()) if has_bias else None
        return LinearWeights(weight, bias)

    def has(self, name: str) -> bool:
        return name in self._names

    def untaken(self) -> list[str]:
        return sorted(self._names - self._taken)

    def _get(self, shards: "_OpenShards", name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._names:
            raise ModelError(f"parameter {name} is missing from the checkpoint")
        tensor = shards.tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"parameter {name} has shape {tuple(tensor.shape)}, the config says {shape}")
        if name not in self._taken:
            self._taken.add(name)
            if self._on_progress is not None:
                self._on_progress(len(self._taken), len(self._names))
        return tensor


class _OpenShards:
    """Files of a checkpoint, each opened when first needed; a tensor keeps the mapping of its file alive."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self._handles: dict[Path, safe_open] = {}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that is mapped from disk: its pages are read when they are first touched."""
        path = self._files.path_of(name)
        if path not in self._handles:
            self._handles[path] = safe_open(str(path), framework="pt")
        tensor: Tensor = self._handles[path].get_tensor(name)  # type: ignore[no-untyped-call]  # not annotated
        return tensor


def _layer(take: _Taker, config: DecoderConfig, prefix: str, has_experts: bool) -> LayerWeights:
    names, hidden = config.architecture.norm_names, config.hidden_size
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv_names = [f"{prefix}self_attn.{name}" for name in config.architecture.qkv_names]
    qkv_sizes = [num_q, num_kv, num_kv] if len(qkv_names) > 1 else [num_q + 2 * num_kv]

    def norm(name: str | None) -> NormWeights | None:
        is_absent = name is None or (config.is_parallel and name == names.mlp_input)
        return None if is_absent else _norm(take, config, f"{prefix}{name}")

    return LayerWeights(
        attention_input_norm=norm(names.attention_input),
        qkv=take.linear(qkv_names, qkv_sizes, hidden, config.has_qkv_bias),
        head_norm=_head_norm(take, config, f"{prefix}self_attn."),
        output=take.linear([f"{prefix}self_attn.o_proj"], [hidden], num_q, config.has_output_bias),
        attention_output_norm=norm(names.attention_output),
        mlp_input_norm=norm(names.mlp_input),
        mlp=_experts(take, config, prefix) if has_experts else _dense_mlp(take, config, f"{prefix}mlp."),
        mlp_output_norm=norm(names.mlp_output),
    )


def _norm(take: _Taker, config: DecoderConfig, name: str) -> NormWeights:
    shape = (config.hidden_size,)
    bias = take(f"{name}.bias", shape) if config.architecture.norm is Norm.LAYER else None
    return NormWeights(_norm_weight(take, config, f"{name}.weight", shape), bias)


def _norm_weight(take: _Taker, config: DecoderConfig, name: str, shape: tuple[int, ...]) -> Tensor:
    match config.architecture.norm:
        case Norm.RMS_WIDE:
            return take(name, shape, torch.float32)
        case Norm.RMS_OFFSET:
            return take(name, shape, torch.float32) + 1.0
        case Norm.RMS | Norm.LAYER:
            return take(name, shape)


def _head_norm(take: _Taker, config: DecoderConfig, prefix: str) -> Tensor | None:
    head_dim, counts = config.head_dim, {"q": config.num_heads, "k": config.num_kv_heads}
    match config.head_norm:
        case HeadNorm.NONE:
            return None
        case HeadNorm.SHARED:
            shared = {part: _norm_weight(take, config, f"{prefix}{part}_norm.weight", (head_dim,)) for part in counts}
            return torch.cat([shared[part].expand(count, head_dim) for part, count in counts.items()])
        case HeadNorm.FULL_WIDTH:
            return torch.cat(
                [
                    _norm_weight(take, config, f"{prefix}{part}_norm.weight", (count * head_dim,))
                    for part, count in counts.items()
                ]
            )
        case HeadNorm.EACH_HEAD:
            names = [
                f"{prefix}{part}_layernorm.norms.{head}.weight"
                for part, count in counts.items()
                for head in range(count)
            ]
            return torch.stack([_norm_weight(take, config, name, (head_dim,)) for name in names])


def _dense_mlp(take: _Taker, config: DecoderConfig, prefix: str) -> MlpWeights:
    return _mlp(take, config, config.architecture.mlp_names, prefix, config.intermediate_size)


def _mlp(take: _Taker, config: DecoderConfig, names: MlpNames, prefix: str, inner: int) -> MlpWeights:
    num_rows = 2 * inner if names.gated else inner
    sizes = [num_rows // len(names.up)] * len(names.up)
    up_names = [f"{prefix}{name}" for name in names.up]
    return MlpWeights(
        up=take.linear(up_names, sizes, config.hidden_size, config.has_mlp_bias),
        down=take.linear([f"{prefix}{names.down}"], [config.hidden_size], inner, config.has_mlp_bias),
    )


def _experts(take: _Taker, config: DecoderConfig, layer_prefix: str) -> ExpertsWeights:
    names, shape = config.architecture.experts, config.experts
    assert names is not None and shape is not None
    prefix, hidden, inner = f"{layer_prefix}{names.block}.", config.hidden_size, shape.intermediate_size
    shards = take.open_shards()

    def one(expert: str) -> MlpWeights:
        up_names = [f"{expert}{name}" for name in names.mlp.up]
        up = take.unrounded(up_names, [inner] * len(up_names), hidden, shards)
        down = take.unrounded([f"{expert}{names.mlp.down}"], [hidden], inner, shards)
        return MlpWeights(LinearWeights(up, None), LinearWeights(down, None))

    return ExpertsWeights(
        router=take.unrounded([f"{prefix}gate"], [shape.num_experts], hidden, shards),
        experts=tuple(one(f"{prefix}experts.{expert}.") for expert in range(shape.num_experts)),
        shared=_shared_expert(take, config, shape, prefix),
        shared_gate=take.unrounded([f"{prefix}shared_expert_gate"], [1], hidden, shards) if names.has_shared else None,
    )


def _shared_expert(take: _Taker, config: DecoderConfig, shape: ExpertsShape, prefix: str) -> MlpWeights | None:
    if shape.shared_intermediate_size is None:
        return None
    return _mlp(take, config, MlpNames(), f"{prefix}shared_expert.", shape.shared_intermediate_size)


def _lm_head_name(take: _Taker, config: DecoderConfig, embedding_name: str) -> str | None:
    """Return where the output head is stored; None if it is the embedding: tied, and not stored with other values."""
    name = next((each for each in _LM_HEADS if take.has(each)), None)
    if name is None:
        if not config.tie_word_embeddings:
            raise ModelError(f"{_LM_HEADS[0]} is missing and tie_word_embeddings is false: there is no output head")
        return None
    shape = (config.vocab_size, config.hidden_size)
    if config.tie_word_embeddings and torch.equal(take(name, shape), take(embedding_name, shape)):
        return None
    return name


def _read_index(index: Path) -> dict[str, Path]:
    try:
        weight_map: dict[str, Any] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index}: not a weight index ({error})") from error
    file_by_name = {name: index.parent / str(file) for name, file in weight_map.items()}
    for path in sorted(set(file_by_name.values())):
        if not path.exists():
            raise ModelError(f"{path}: this shard is named by {index.name} but is not there")
        lacking = {name for name, file in file_by_name.items() if file == path} - _names_in(path)
        if lacking:
            raise ModelError(f"{path}: lacks {sorted(lacking)[0]}, which {index.name} says it holds")
    return file_by_name


def _names_in(path: Path) -> set[str]:
    try:
        with safe_open(str(path), framework="pt") as file:
            return set(file.keys())
    except Exception as error:  # safetensors raises its own type for a damaged header
        raise ModelError(f"{path}: not a readable safetensors file ({error})") from error
