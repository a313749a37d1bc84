"""The operations that a decoder is made of, and the choice, once, of who performs them."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.activation import Activation, gated_activation
from pdserve.kernels.attention import AttentionSpan, paged_attention
from pdserve.kernels.cpu import CpuKernels
from pdserve.kernels.fused_layer import FusedLayer, GatedLayer, Weight
from pdserve.kernels.int8_linear import Int8Weight, int8_linear
from pdserve.kernels.kv_store import store_kv
from pdserve.kernels.rms_norm import rms_norm
from pdserve.kernels.rope import apply_rope

Rotation = tuple[Tensor, Tensor]  # cosines and sines, each [num_tokens, rotary_dim / 2]


class Operations(Protocol):
    """What a decoder computes with. Every result belongs to one row, or to one sequence; none is padded."""

    @property
    def description(self) -> str:
        """Who performs them, for the log."""
        ...

    @property
    def has_own_threads(self) -> bool:
        """Whether they run on threads other than torch's."""
        ...

    def pack(self, weight: Tensor) -> Weight:
        """Lay a weight [out_features, in_features] out for `linear` and `embed`."""
        ...

    def pack_unrounded(self, weight: Tensor) -> Weight:
        """Lay a weight [out_features, in_features] out for `linear` and never round it to 8 bits."""
        ...

    def linear(self, rows: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features]: rows weight^T + bias."""
        ...

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size]: rows of the embedding."""
        ...

    def rms_norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[num_rows, size]: weight * x / sqrt(mean(x^2) + eps)."""
        ...

    def norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[num_tokens, ..., size]: the same of each head, its weight [size], or [num_heads, size] for each its own."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[num_rows, 2 * size] -> [num_rows, size]: silu(gate) * up."""
        ...

    def rope_store(
        self, heads: Tensor, rotation: Rotation | None, kv_blocks: Tensor, slot_mapping: Tensor
    ) -> Tensor:  # [num_tokens, num_heads, head_dim]: the queries
        """Rotate queries and keys of heads [num_tokens, num_heads + 2 * num_kv_heads, head_dim], write keys and values
        into their slots of one layer's cache, return the queries. May change `heads`."""
        ...

    def prepare(self, spans: Sequence[AttentionSpan]) -> Any:
        """Lay the spans of a batch out for `attention`, once for all layers."""
        ...

    def attention(
        self, query: Tensor, kv_blocks: Tensor, spans: Any, scale: float, window: int | None, soft_cap: float | None
    ) -> Tensor:  # [num_tokens, num_heads, head_dim]
        """Causal attention of each span over its blocks of one layer's cache."""
        ...

    def fuse(self, layer: GatedLayer) -> FusedLayer | None:
        """Lay a whole layer out for `run_layers`; None if it has to be run operation by operation."""
        ...

    def run_layers(
        self,
        layers: Sequence[FusedLayer],
        hidden: Tensor,
        rotations: Sequence[Rotation | None],
        kv_layers: Sequence[Tensor],
        slot_mapping: Tensor,
        spans: Any,
    ) -> None:
        """Run fused layers; changes `hidden` in place."""
        ...


class TorchOperations:
    """The reference: plain torch, for any dtype. A row's result may differ in its last bits by the batch it is in."""

    description = "torch kernels"
    has_own_threads = False

    def pack(self, weight: Tensor) -> Weight:
        return weight

    def pack_unrounded(self, weight: Tensor) -> Weight:
        return weight

    def linear(self, rows: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, Tensor)
        return F.linear(rows, weight, bias)

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, Tensor)
        return F.embedding(token_ids, weight)

    def rms_norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(rows, weight, eps)

    def norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(heads, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return gated_activation(gate_up, Activation.SILU)

    def rope_store(self, heads: Tensor, rotation: Rotation | None, kv_blocks: Tensor, slot_mapping: Tensor) -> Tensor:
        num_kv_heads = kv_blocks.shape[2]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        rotated = heads[:, : num_heads + num_kv_heads]
        if rotation is not None:
            rotated = apply_rope(rotated, *rotation)
        store_kv(rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :], kv_blocks, slot_mapping)
        return rotated[:, :num_heads]

    def prepare(self, spans: Sequence[AttentionSpan]) -> Any:
        return spans

    def attention(
        self, query: Tensor, kv_blocks: Tensor, spans: Any, scale: float, window: int | None, soft_cap: float | None
    ) -> Tensor:
        return paged_attention(query, kv_blocks, spans, scale, window, soft_cap)

    def fuse(self, layer: GatedLayer) -> FusedLayer | None:
        return None

    def run_layers(
        self,
        layers: Sequence[FusedLayer],
        hidden: Tensor,
        rotations: Sequence[Rotation | None],
        kv_layers: Sequence[Tensor],
        slot_mapping: Tensor,
        spans: Any,
    ) -> None:
        raise RuntimeError("torch runs no fused layer: `fuse` gave none")


class TorchInt8Operations(TorchOperations):
    """The reference with weights of 8-bit integers: right, and slow."""

    description = "torch kernels, int8 weights without speed"

    def pack(self, weight: Tensor) -> Weight:
        return Int8Weight.of(weight)

    def linear(self, rows: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        if not isinstance(weight, Int8Weight):
            return super().linear(rows, weight, bias)
        return int8_linear(rows, weight, bias)

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        assert not isinstance(weight, Int8Weight)
        return super().embed(token_ids, weight).float()


def choose_operations(
    dtype: str,
    num_threads: int,
    *,
    use_cpu_kernels: bool,
    triton_device: torch.device | None = None,
    is_batch_invariant: bool = False,
) -> Operations:
    """Return Triton's kernels where a device for them is given, the compiled ones for the CPU where they are built and
    compute with weights of this dtype, else the reference."""
    is_int8 = dtype == "int8"
    if triton_device is not None:
        from pdserve.kernels.triton.operations import TritonOperations  # triton is installed beside GPUs only

        return TritonOperations(triton_device, is_int8=is_int8, is_batch_invariant=is_batch_invariant)
    if use_cpu_kernels and (is_int8 or dtype == "float32"):
        kernels = CpuKernels.load(num_threads, is_int8=is_int8)
        if kernels is not None:
            return kernels
    return TorchInt8Operations() if is_int8 else TorchOperations()
