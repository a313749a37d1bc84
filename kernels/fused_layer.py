"""A decoder layer that the compiled kernels run in one call: what it is made of, and how it is handed over."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor

from pdserve.kernels.int8_linear import Int8Weight
from pdserve.kernels.packed_weight import PackedInt8Weight, PackedWeight

ROW_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}  # of kernels/cpu_kv_cache.h
Weight = Tensor | PackedWeight | PackedInt8Weight | Int8Weight  # [out_features, in_features], as its operations want it


@dataclass(frozen=True, slots=True)
class Projection:
    """y = x weight^T + bias."""

    weight: Weight
    bias: Tensor | None  # [out_features]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedLayer:
    """x += r attention(rms_norm(x)); x += r down(silu(gate) * up of rms_norm(x)), with r the residual multiplier."""

    input_norm: Tensor  # [hidden_size] float32
    mlp_norm: Tensor  # [hidden_size] float32
    qkv: Projection
    output: Projection
    up: Projection  # gate and up stacked
    down: Projection
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    eps: float
    scale: float
    soft_cap: float | None
    residual: float


class _Int8Weight(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("num_outputs", "num_inputs")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "mlp_norm")),
        *((name, _Int8Weight) for name in ("qkv", "output", "up", "down")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "window")),
        *((name, ctypes.c_float) for name in ("eps", "scale", "soft_cap", "residual")),
    )


class RowCache(ctypes.Structure):
    """One layer of a KV cache [num_blocks, 2, num_kv_heads, block_size, row_elements], as an address."""

    _fields_ = (
        ("blocks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("format", "block_stride_bytes", "block_size")),
    )

    @classmethod
    def of(cls, kv_blocks: Tensor) -> "RowCache":
        """Describe a layer's cache to the kernels; whoever uses it keeps the tensor alive."""
        stride_bytes = kv_blocks.stride(0) * kv_blocks.itemsize
        return cls(kv_blocks.data_ptr(), ROW_FORMATS[kv_blocks.dtype], stride_bytes, kv_blocks.shape[3])


class Step(ctypes.Structure):
    """The rows of one step and one layer's cache, as addresses; whoever fills it keeps the tensors alive."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "cos", "sin", "slots", "spans")),
        ("cache", RowCache),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_spans", "half", "num_threads")),
    )


class FusedLayer:
    """A layer laid out for the kernels; keeps its tensors alive."""

    __slots__ = ("address", "layer", "structure")

    def __init__(self, layer: GatedLayer) -> None:
        self.layer = layer
        self.structure = _Layer(
            layer.input_norm.data_ptr(),
            layer.mlp_norm.data_ptr(),
            *(_int8_weight(each) for each in (layer.qkv, layer.output, layer.up, layer.down)),
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.window or 0,
            layer.eps,
            layer.scale,
            layer.soft_cap or 0.0,
            layer.residual,
        )
        self.address = ctypes.addressof(self.structure)

    @classmethod
    def of(cls, layer: GatedLayer) -> "FusedLayer | None":
        """Return the layer, or None if its weights are not of 8 bits."""
        parts = (layer.qkv, layer.output, layer.up, layer.down)
        return cls(layer) if all(isinstance(part.weight, PackedInt8Weight) for part in parts) else None


class LayerSteps:
    """The steps of layers that run in one call, over their caches: laid out once, since from run to run only rows and
    rotations change. Keeps what they are of alive."""

    __slots__ = ("_kv_layers", "_layers", "addresses", "steps")

    def __init__(self, layers: Sequence[FusedLayer], kv_layers: Sequence[Tensor], num_threads: int) -> None:
        self._layers, self._kv_layers = tuple(layers), tuple(kv_layers)
        self.addresses = (ctypes.c_void_p * len(layers))(*[layer.address for layer in layers])
        self.steps = (Step * len(layers))()
        for step, kv_blocks in zip(self.steps, kv_layers, strict=True):
            step.cache, step.num_threads = RowCache.of(kv_blocks), num_threads

    def are_of(self, layers: Sequence[FusedLayer], kv_layers: Sequence[Tensor]) -> bool:
        """Whether these are the very layers and caches."""
        return (
            len(layers) == len(self._layers)
            and all(map(is_, layers, self._layers))
            and all(map(is_, kv_layers, self._kv_layers))
        )

    def fill(
        self,
        hidden: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor] | None],
        slot_mapping: Tensor,
        table: Tensor,  # of the spans
    ) -> None:
        """Take the rows of the next run, and the rotation of each layer; the caller keeps their tensors alive."""
        rows, slots, spans = hidden.data_ptr(), slot_mapping.data_ptr(), table.data_ptr()
        num_tokens, num_spans = hidden.shape[0], table.shape[0]
        rotation, pointers = None, _pointers(None)
        for step, own in zip(self.steps, rotations, strict=True):
            if own is not rotation:  # most layers have that of the layer before
                rotation, pointers = own, _pointers(own)
            step.hidden, step.slots, step.spans = rows, slots, spans
            step.num_tokens, step.num_spans = num_tokens, num_spans
            step.cos, step.sin, step.half = pointers


def _pointers(rotation: tuple[Tensor, Tensor] | None) -> tuple[int | None, int | None, int]:
    if rotation is None:
        return None, None, 0
    return rotation[0].data_ptr(), rotation[1].data_ptr(), rotation[0].shape[1]


def _int8_weight(projection: Projection) -> _Int8Weight:
    weight = projection.weight
    assert isinstance(weight, PackedInt8Weight)
    bias = None if projection.bias is None else projection.bias.data_ptr()
    return _Int8Weight(
        weight.panels.data_ptr(), weight.scales.data_ptr(), bias, weight.out_features, weight.in_features
    )
