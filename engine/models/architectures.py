"""What each supported model_type means: all that a family's code fixes and its config.json does not say.

One row a family; the decoder knows no family names. `defaults` are the values a config may leave out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Norm(StrEnum):
    """How hidden states are normalised."""

    RMS = "rms"
    RMS_WIDE = "rms_wide"  # rounded to the model's dtype after the weight, not before it
    RMS_OFFSET = "rms_offset"  # as RMS_WIDE, with 1 + weight
    LAYER = "layer"


class HeadNorm(StrEnum):
    """How queries and keys are normalised before they are rotated."""

    NONE = "none"
    SHARED = "shared"  # over head_dim, one weight for all heads
    FULL_WIDTH = "full_width"  # over all heads together
    EACH_HEAD = "each_head"  # over head_dim, every head its own weight, layer norm without bias


class Window(StrEnum):
    """Which layers look back only `sliding_window` tokens, where the config does not list them."""

    NONE = "none"
    EVERY_LAYER = "every_layer"
    EVERY_OTHER = "every_other"  # the even ones, from layer 0
    FROM_LAYER = "from_layer"  # layers >= max_window_layers
    EVERY_OTHER_BELOW = "every_other_below"  # the even ones below max_window_layers
    ALL_BUT_NTH = "all_but_nth"  # all but each sliding_window_pattern-th
    UNROTATED = "unrotated"  # the layers without rope


@dataclass(frozen=True, slots=True)
class NormNames:
    """Parameter names of a layer's norms; None where the family has none."""

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Parameter names of a feed-forward block: one name where the checkpoint stores gate and up fused."""

    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    gated: bool = True


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a mixture of experts, in the config and in the checkpoint."""

    block: str
    mlp: MlpNames
    count_keys: tuple[str, ...]
    inner_size_key: str
    normalizes: bool  # True: chosen probabilities always sum to 1; False: only with norm_topk_prob
    has_shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One family. A bias is there always, never, or if the named config key says so."""

    norm: Norm = Norm.RMS
    norm_eps_key: str = "rms_norm_eps"
    norm_names: NormNames = NormNames()
    head_norm: HeadNorm = HeadNorm.NONE
    head_norm_key: str | None = None
    activation_key: str = "hidden_act"
    qkv_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    mlp_names: MlpNames = MlpNames()
    experts: ExpertNames | None = None
    window: Window = Window.NONE
    window_switch: str | None = None  # the config key without which sliding_window means nothing
    lists_layer_types: bool = False
    rope_by_layer_type: bool = False
    rotates_partially: bool = False
    has_unrotated_layers: bool = False
    scales_embedding: bool = False  # by sqrt(hidden_size)
    has_multipliers: bool = False
    scales_query: bool = False  # by query_pre_attn_scalar^-0.5 instead of head_dim^-0.5
    caps_attention: bool = False
    caps_logits: bool = False
    may_be_parallel: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)


_QWEN_EXPERTS = ExpertNames("mlp", MlpNames(), ("num_experts", "num_local_experts"), "moe_intermediate_size", False)
_SANDWICH = NormNames(
    attention_output="post_attention_layernorm",
    mlp_input="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)
_GEMMA_DEFAULTS: Mapping[str, object] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA3 = Architecture(
    norm=Norm.RMS_OFFSET,
    norm_names=_SANDWICH,
    head_norm=HeadNorm.SHARED,
    activation_key="hidden_activation",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    window=Window.ALL_BUT_NTH,
    lists_layer_types=True,
    rope_by_layer_type=True,
    scales_embedding=True,
    scales_query=True,
    caps_logits=True,
    defaults={
        **_GEMMA_DEFAULTS,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
    },
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Architecture(
        window=Window.EVERY_LAYER,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Architecture(
        qkv_bias=True,
        window=Window.FROM_LAYER,
        window_switch="use_sliding_window",
        lists_layer_types=True,
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "qwen3": Architecture(
        head_norm=HeadNorm.SHARED,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        window=Window.FROM_LAYER,
        window_switch="use_sliding_window",
        lists_layer_types=True,
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "gemma2": Architecture(
        norm=Norm.RMS_OFFSET,
        norm_names=_SANDWICH,
        activation_key="hidden_activation",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        window=Window.EVERY_OTHER,
        lists_layer_types=True,
        scales_embedding=True,
        scales_query=True,
        caps_attention=True,
        caps_logits=True,
        defaults={
            **_GEMMA_DEFAULTS,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi3": Architecture(
        rotates_partially=True,
        qkv_names=("qkv_proj",),
        mlp_names=MlpNames(up=("gate_up_proj",)),
        window=Window.EVERY_LAYER,
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
    ),
    "smollm3": Architecture(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        window=Window.UNROTATED,
        window_switch="use_sliding_window",
        lists_layer_types=True,
        has_unrotated_layers=True,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
    ),
    "granite": Architecture(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        has_multipliers=True,
    ),
    "olmo2": Architecture(
        norm=Norm.RMS_WIDE,
        norm_names=NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        head_norm=HeadNorm.FULL_WIDTH,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        defaults={"rms_norm_eps": 1e-5},
    ),
    "starcoder2": Architecture(
        norm=Norm.LAYER,
        norm_eps_key="norm_epsilon",
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        mlp_names=MlpNames(up=("c_fc",), down="c_proj", gated=False),
        window=Window.EVERY_LAYER,
        defaults={
            "norm_epsilon": 1e-5,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "stablelm": Architecture(
        norm=Norm.LAYER,
        norm_eps_key="layer_norm_eps",
        head_norm=HeadNorm.EACH_HEAD,
        head_norm_key="qk_layernorm",
        qkv_bias="use_qkv_bias",
        may_be_parallel=True,
        rotates_partially=True,
        defaults={
            "layer_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
        },
    ),
    "mixtral": Architecture(
        window=Window.EVERY_LAYER,
        experts=ExpertNames(
            "block_sparse_moe",
            MlpNames(up=("w1", "w3"), down="w2"),
            ("num_local_experts", "num_experts"),
            "intermediate_size",
            True,
        ),
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen2_moe": Architecture(
        qkv_bias="qkv_bias",
        window=Window.EVERY_OTHER_BELOW,
        window_switch="use_sliding_window",
        lists_layer_types=True,
        experts=ExpertNames(
            "mlp", MlpNames(), ("num_experts",), "moe_intermediate_size", normalizes=False, has_shared=True
        ),
        defaults={
            "qkv_bias": True,
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3_moe": Architecture(
        head_norm=HeadNorm.SHARED,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        window=Window.EVERY_LAYER,
        window_switch="use_sliding_window",
        experts=_QWEN_EXPERTS,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
}
