"""The shape of a decoder, read from a Hugging Face config.json by the rules of its architecture."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.engine.errors import ModelError
from pdserve.engine.models.architectures import ARCHITECTURES, Architecture, HeadNorm
from pdserve.engine.models.layer_pattern import LayerShape, layer_shapes
from pdserve.engine.models.refusals import refuse_unsupported
from pdserve.engine.models.rope import RopeConfig

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """A mixture of experts: each token is sent to `num_chosen` of `num_experts` feed-forward blocks."""

    num_experts: int
    num_chosen: int
    intermediate_size: int
    is_normalized: bool
    shared_intermediate_size: int | None


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Constants on the way from embedding to logits."""

    embedding: float
    attention: float
    residual: float
    logits_divisor: float
    attention_soft_cap: float | None
    logits_soft_cap: float | None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and constants of a decoder; `architecture` holds what the sizes do not say."""

    model_type: str
    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_norm: HeadNorm
    norm_eps: float
    activation: str
    is_parallel: bool
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    multipliers: Multipliers
    experts: ExpertsShape | None
    layers: tuple[LayerShape, ...]
    ropes: tuple[RopeConfig, ...]

    @property
    def rope(self) -> RopeConfig:
        """The rotation of the layers that see the whole context."""
        return self.ropes[0]

    @property
    def context_len(self) -> int:
        """Tokens that the model is meant for."""
        return self.rope.context_len

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DecoderConfig":
        """Read the fields of a config.json.

        Raises:
            ModelError: the architecture, or something it asks for, is not supported; the text names it.
        """
        model_type = str(config.get("model_type"))
        refuse_unsupported(config, model_type)
        architecture = ARCHITECTURES[model_type]
        fields = _fields(config, architecture)
        try:
            return _read(fields, model_type, architecture)
        except KeyError as error:
            raise ModelError(f"config.json of this {model_type} model lacks {error.args[0]!r}") from error


def _fields(config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """The config's own values over the family's defaults; of a composed config, its text part."""
    text: dict[str, Any] | None = config.get("text_config")
    if text is None:
        return {**architecture.defaults, **config}
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return {**architecture.defaults, **text, **tied}


def _read(fields: dict[str, Any], model_type: str, architecture: Architecture) -> DecoderConfig:
    num_heads = int(fields["num_attention_heads"])
    num_kv_heads = int(fields.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads {num_heads} is not a multiple of {num_kv_heads} KV heads")
    head_dim = int(fields.get("head_dim") or fields["hidden_size"] // num_heads)
    has_head_norm = architecture.head_norm_key is None or bool(fields.get(architecture.head_norm_key))
    return DecoderConfig(
        model_type=model_type,
        architecture=architecture,
        vocab_size=int(fields["vocab_size"]),
        hidden_size=int(fields["hidden_size"]),
        intermediate_size=int(fields["intermediate_size"]),
        num_layers=int(fields["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_norm=architecture.head_norm if has_head_norm else HeadNorm.NONE,
        norm_eps=float(fields.get(architecture.norm_eps_key, 1e-6)),
        activation=_activation(fields, model_type, architecture),
        is_parallel=architecture.may_be_parallel and bool(fields.get("use_parallel_residual")),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        has_qkv_bias=_is_set(fields, architecture.qkv_bias),
        has_output_bias=_is_set(fields, architecture.output_bias),
        has_mlp_bias=_is_set(fields, architecture.mlp_bias),
        multipliers=_multipliers(fields, architecture, head_dim),
        experts=_experts(fields, architecture),
        layers=layer_shapes(fields, architecture),
        ropes=RopeConfig.all_from_config(fields, architecture, head_dim),
    )


def _activation(fields: Mapping[str, Any], model_type: str, architecture: Architecture) -> str:
    key = architecture.activation_key
    activation = str(fields.get(key) or architecture.defaults.get(key) or "silu")
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ModelError(f"{key} {activation!r} is not supported for {model_type}; supported: {known}")
    return activation


def _is_set(fields: Mapping[str, Any], rule: bool | str) -> bool:
    return bool(fields.get(rule, False)) if isinstance(rule, str) else rule


def _multipliers(fields: Mapping[str, Any], architecture: Architecture, head_dim: int) -> Multipliers:
    attention = head_dim**-0.5
    if architecture.scales_query:
        attention = float(fields["query_pre_attn_scalar"]) ** -0.5
    if architecture.has_multipliers:
        attention = float(fields.get("attention_multiplier", 1.0))

    def of(name: str) -> float:
        return float(fields.get(name, 1.0)) if architecture.has_multipliers else 1.0

    def cap(name: str, applies: bool) -> float | None:
        value = fields.get(name) if applies else None
        return None if value is None else float(value)

    return Multipliers(
        embedding=math.sqrt(fields["hidden_size"]) if architecture.scales_embedding else of("embedding_multiplier"),
        attention=attention,
        residual=of("residual_multiplier"),
        logits_divisor=of("logits_scaling"),
        attention_soft_cap=cap("attn_logit_softcapping", architecture.caps_attention),
        logits_soft_cap=cap("final_logit_softcapping", architecture.caps_logits),
    )


def _experts(fields: Mapping[str, Any], architecture: Architecture) -> ExpertsShape | None:
    names = architecture.experts
    if names is None:
        return None
    # The family's defaults come first in the merge: a key that the config itself has wins over a synonym's default.
    given = [key for key in names.count_keys if fields.get(key) != architecture.defaults.get(key)]
    num_experts = int(fields[given[0] if given else names.count_keys[0]])
    num_chosen = int(fields["num_experts_per_tok"])
    if num_chosen > num_experts:
        raise ModelError(f"num_experts_per_tok {num_chosen} is more than the {num_experts} experts there are")
    shared = int(fields["shared_expert_intermediate_size"]) if names.has_shared else None
    return ExpertsShape(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=int(fields[names.inner_size_key]),
        is_normalized=names.normalizes or bool(fields.get("norm_topk_prob", False)),
        shared_intermediate_size=shared,
    )
