"""A decoder over a paged KV cache, written once for every family that `architectures` describes."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.errors import StepInterrupted
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.model_input import ModelInput
from pdserve.engine.models.architectures import HeadNorm
from pdserve.engine.models.decoder_config import DecoderConfig
from pdserve.engine.models.fused_layers import fuse_layer
from pdserve.engine.models.layer_pattern import LayerShape
from pdserve.engine.models.layer_weights import (
    DecoderWeights,
    ExpertsWeights,
    LayerWeights,
    LinearWeights,
    MlpWeights,
    NormWeights,
)
from pdserve.engine.models.rope import RotaryEmbedding, RotaryEmbeddings
from pdserve.kernels.experts import choose_experts, mix_experts
from pdserve.kernels.fused_layer import FusedLayer
from pdserve.kernels.operations import Operations

_FEW_TOKENS = 64  # a step of so few is soon over: nobody stops it between two layers


def _gelu_tanh(rows: Tensor) -> Tensor:
    return F.gelu(rows, approximate="tanh")


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}


class _Step(NamedTuple):
    """What the layers of a step are given: of each its rotation and its cache, for all the slots and the spans."""

    rotations: Sequence[tuple[Tensor, Tensor] | None]
    kv_layers: Sequence[Tensor]
    slot_mapping: Tensor
    spans: Any


class Decoder:
    """Token ids in, logits of the wanted rows out; owns weights and rotations, not the cache."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, rotary: RotaryEmbeddings, operations: Operations
    ) -> None:
        self.config = config
        self.rotary = rotary
        self._operations = operations
        self.is_interrupted = False  # set from another thread: nobody wants the result any more
        self._weights = weights
        self._activation = _ACTIVATIONS[config.activation]
        fused = [
            fuse_layer(config, shape, layer, operations)
            for shape, layer in zip(config.layers, weights.layers, strict=True)
        ]
        # Of each layer: it and those that follow it as far as they are fused, which run in one call.
        self._fused_runs = [_until_none(fused[index:]) for index in range(len(fused))]
        # The scale is rounded as the embedding is: what the reference computes with in 16 bits.
        self._embedding_scale = torch.tensor(config.multipliers.embedding, dtype=weights.lm_head.dtype)

    def forward(
        self, model_input: ModelInput, kv_cache: KVCache, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:  # [num_tokens, hidden_size]
        """Compute the hidden states of every token and store its keys and values; `on_layer` is told how many layers
        have done so.

        Raises:
            StepInterrupted: `is_interrupted` was set; some layers' keys and values are missing.
        """
        hidden = self._operations.embed(model_input.token_ids, self._weights.embedding)
        if self.config.multipliers.embedding != 1.0:
            hidden = hidden * self._embedding_scale
        step = self._step(model_input, kv_cache, hidden.dtype)
        most = self.config.num_layers if on_layer is None and len(hidden) <= _FEW_TOKENS else 1
        index = 0
        while index < self.config.num_layers:
            if self.is_interrupted:
                raise StepInterrupted("the engine is told to end")
            if on_layer is not None:
                on_layer(index)
            fused = self._fused_runs[index][:most]
            if fused:
                end = index + len(fused)
                rotations, kv_layers = step.rotations[index:end], step.kv_layers[index:end]
                self._operations.run_layers(fused, hidden, rotations, kv_layers, step.slot_mapping, step.spans)
                index = end
            else:
                hidden = self._run_layer(index, hidden, step)
                index += 1
        if on_layer is not None:
            on_layer(self.config.num_layers)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:  # [num_rows, vocab_size] float32
        """Project the given rows of hidden states onto the vocabulary."""
        normed = self._norm(hidden, self._weights.final_norm)
        logits = self._operations.linear(normed, self._weights.lm_head, None).float()
        multipliers = self.config.multipliers
        if multipliers.logits_divisor != 1.0:
            logits = logits / multipliers.logits_divisor
        if multipliers.logits_soft_cap is not None:
            logits = torch.tanh(logits / multipliers.logits_soft_cap) * multipliers.logits_soft_cap
        return logits

    def cache_salt(self, num_prompt_tokens: int) -> str:
        """Return what prefix sharing must be keyed by besides tokens and tenant."""
        return self.rotary.cache_salt(num_prompt_tokens)

    def _step(self, model_input: ModelInput, kv_cache: KVCache, dtype: torch.dtype) -> "_Step":
        rotations = self.rotary.rotations(model_input.positions, model_input.rope_lengths, dtype)
        return _Step(
            [None if shape.rope is None else rotations[shape.rope] for shape in self.config.layers],
            kv_cache.layers,
            model_input.slot_mapping,
            model_input.layout or self._operations.prepare(model_input.spans),
        )

    def _run_layer(self, index: int, hidden: Tensor, step: "_Step") -> Tensor:
        """Compute one layer operation by operation."""
        shape, layer, kv_blocks = self.config.layers[index], self._weights.layers[index], step.kv_layers[index]
        residual_multiplier = self.config.multipliers.residual
        normed = self._norm(hidden, layer.attention_input_norm)
        heads = self._heads(layer, normed)
        query = self._operations.rope_store(heads, step.rotations[index], kv_blocks, step.slot_mapping)
        attended = self._attention(layer, shape, query, kv_blocks, step.spans)
        attended = self._norm(attended, layer.attention_output_norm)
        if self.config.is_parallel:
            return hidden + attended + self._feed_forward(layer, normed)
        hidden = torch.add(hidden, attended, alpha=residual_multiplier)
        fed = self._feed_forward(layer, self._norm(hidden, layer.mlp_input_norm))
        return torch.add(hidden, self._norm(fed, layer.mlp_output_norm), alpha=residual_multiplier)

    def _heads(self, layer: LayerWeights, normed: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values."""
        config = self.config
        heads = self._linear(layer.qkv, normed).view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        if layer.head_norm is not None:
            num_normed = config.num_heads + config.num_kv_heads
            heads[:, :num_normed] = self._norm_heads(heads[:, :num_normed], layer.head_norm)
        return heads

    def _attention(
        self, layer: LayerWeights, shape: LayerShape, query: Tensor, kv_blocks: Tensor, spans: Any
    ) -> Tensor:
        multipliers = self.config.multipliers
        attended = self._operations.attention(
            query, kv_blocks, spans, multipliers.attention, shape.window, multipliers.attention_soft_cap
        )
        return self._linear(layer.output, attended.flatten(1))

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:  # [num_tokens, num_heads + num_kv_heads, head_dim]
        config = self.config
        if config.head_norm is HeadNorm.SHARED:
            return self._operations.norm_heads(heads, weight, config.norm_eps)
        if config.head_norm is HeadNorm.EACH_HEAD:
            return F.layer_norm(heads, (config.head_dim,), eps=config.norm_eps) * weight
        widths = [config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim]
        parts = zip(torch.split(heads.flatten(1), widths, dim=-1), torch.split(weight, widths), strict=True)
        normed = [self._operations.norm_heads(part, own, config.norm_eps) for part, own in parts]
        return torch.cat(normed, dim=-1).view(heads.shape)

    def _norm(self, hidden: Tensor, norm: NormWeights | None) -> Tensor:
        if norm is None:
            return hidden
        if norm.bias is None:
            return self._operations.rms_norm(hidden, norm.weight, self.config.norm_eps)
        return F.layer_norm(hidden, norm.weight.shape, norm.weight, norm.bias, self.config.norm_eps)

    def _feed_forward(self, layer: LayerWeights, normed: Tensor) -> Tensor:
        if isinstance(layer.mlp, ExpertsWeights):
            return self._experts(layer.mlp, normed)
        return self._mlp(layer.mlp, normed)

    def _mlp(self, mlp: MlpWeights, normed: Tensor) -> Tensor:
        inner = self._linear(mlp.up, normed)
        if not self.config.architecture.mlp_names.gated:
            return self._linear(mlp.down, self._activation(inner))
        if self.config.activation == "silu":
            return self._linear(mlp.down, self._operations.silu_mul(inner))
        gate, up = inner.chunk(2, dim=-1)
        return self._linear(mlp.down, self._activation(gate) * up)

    def _linear(self, linear: LinearWeights, rows: Tensor) -> Tensor:
        return self._operations.linear(rows, linear.weight, linear.bias)

    def _experts(self, experts: ExpertsWeights, normed: Tensor) -> Tensor:
        shape = self.config.experts
        assert shape is not None
        scores = self._operations.linear(normed, experts.router, None)
        weights, expert_ids = choose_experts(scores, shape.num_chosen, shape.is_normalized)
        mixed = mix_experts(normed, weights, expert_ids, [partial(self._mlp, each) for each in experts.experts])
        if experts.shared is None or experts.shared_gate is None:
            return mixed
        openness = torch.sigmoid(self._operations.linear(normed, experts.shared_gate, None))
        return mixed + openness * self._mlp(experts.shared, normed)


def _until_none(layers: Sequence[FusedLayer | None]) -> tuple[FusedLayer, ...]:
    return tuple(layer for layer in takewhile(lambda each: each is not None, layers) if layer is not None)


def build_rotary(config: DecoderConfig, max_len: int, device: torch.device) -> RotaryEmbeddings:
    """Build the rotations for sequences of at most `max_len` tokens."""
    return RotaryEmbeddings(tuple(RotaryEmbedding(rope, max_len, device) for rope in config.ropes))
