"""The parameters of a decoder as it computes with them: stacked, in one dtype, on one device."""

from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.fused_layer import Weight


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """y = x weight^T + bias."""

    weight: Weight  # [out_features, in_features]
    bias: Tensor | None  # [out_features]


@dataclass(frozen=True, slots=True)
class NormWeights:
    """Scale and shift of a norm; float32 where the result is rounded after them."""

    weight: Tensor  # [hidden_size]
    bias: Tensor | None  # [hidden_size]


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A feed-forward block; gate and up are stacked into one matrix if it is gated."""

    up: LinearWeights  # [2 * intermediate_size or intermediate_size, hidden_size]
    down: LinearWeights  # [hidden_size, intermediate_size]


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """A mixture of gated feed-forward blocks, and perhaps one more that every token passes."""

    router: Weight  # [num_experts, hidden_size]
    experts: tuple[MlpWeights, ...]
    shared: MlpWeights | None
    shared_gate: Weight | None  # [1, hidden_size]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; q, k, v are stacked into one matrix. Norms that the family lacks are None."""

    attention_input_norm: NormWeights | None
    qkv: LinearWeights  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    head_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]; flat if over the full width
    output: LinearWeights  # [hidden_size, num_heads * head_dim]
    attention_output_norm: NormWeights | None
    mlp_input_norm: NormWeights | None
    mlp: MlpWeights | ExpertsWeights
    mlp_output_norm: NormWeights | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All parameters of a decoder."""

    embedding: Weight  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: NormWeights
    lm_head: Weight  # [vocab_size, hidden_size]; the embedding itself when tied
