"""What a transformers config says about keys and values: layers, KV heads, head size, windows. No torch, no weights.

Reads the names of every family: `num_hidden_layers` is `n_layer` in GPT-2, `num_key_value_heads` is `multi_query` in
StarCoder, and a composed config keeps all of it under `text_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.engine.errors import ModelError
from pdserve.engine.models.architectures import ARCHITECTURES
from pdserve.engine.models.layer_pattern import FULL_ATTENTION, SLIDING_ATTENTION, layer_shapes
from pdserve.engine.models.refusals import why_not_decoder

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_HEAD_DIM = ("head_dim", "kv_channels", "attention_head_size")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "inner_hidden_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_MULTI_QUERY = frozenset({"gpt_bigcode", "falcon", "RefinedWebModel", "RefinedWeb"})  # unless the config says no
_UNGATED = frozenset(
    {
        *("gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "codegen", "opt", "bloom", "mpt", "falcon", "phi"),
        *("starcoder2", "xglm", "biogpt", "nemotron", "persimmon"),
    }
)
_TIED = frozenset({"gpt2", "gpt_bigcode", "gpt_neo", "opt", "bloom", "mpt", "falcon", "gemma", "cohere", "cohere2"})


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of one model; `windows` has one entry a layer, None where it sees everything."""

    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]

    @property
    def num_layers(self) -> int:
        """Layers that keep keys and values."""
        return len(self.windows)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "KVShape":
        """Read a config.json.

        Raises:
            ModelError: it keeps something else than keys and values per head, or lacks a size; the text names it.
        """
        fields, model_type = text_fields(config)
        if reason := why_not_decoder(fields, model_type):
            raise ModelError(f"model_type {model_type!r} has no estimate{reason}")
        if fields.get("kv_lora_rank"):
            raise ModelError(
                f"model_type {model_type!r} has no estimate: its keys and values are latent (kv_lora_rank)"
            )
        num_heads = required(fields, _HEADS, model_type)
        head_dim = first(fields, _HEAD_DIM) or required(fields, _HIDDEN, model_type) // num_heads
        windows = _windows(fields, model_type, required(fields, _LAYERS, model_type))
        return cls(_num_kv_heads(fields, model_type, num_heads), head_dim, windows)


def count_parameters(config: Mapping[str, Any]) -> int:
    """Return about how many parameters the config describes: matrices only, within a few percent.

    Raises:
        ModelError: a size is missing.
    """
    shape = KVShape.from_config(config)
    fields, model_type = text_fields(config)
    hidden, num_heads = required(fields, _HIDDEN, model_type), required(fields, _HEADS, model_type)
    attention = 2 * hidden * shape.head_dim * (num_heads + shape.num_kv_heads)
    inner = first(fields, _INNER) or 4 * hidden
    matrices = 2 if model_type in _UNGATED else 3
    feed_forward = matrices * hidden * inner
    if num_experts := first(fields, _EXPERTS):
        own = first(fields, ("moe_intermediate_size",)) or inner
        shared = first(fields, ("shared_expert_intermediate_size",)) or 0
        feed_forward = matrices * hidden * (num_experts * own + shared)
    is_tied = fields.get("tie_word_embeddings", config.get("tie_word_embeddings", model_type in _TIED))
    embeddings = required(fields, ("vocab_size",), model_type) * hidden * (1 if is_tied else 2)
    return shape.num_layers * (attention + feed_forward) + embeddings


def text_fields(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the fields of the language model, defaults of known families included, and its model type."""
    part = next((config[name] for name in _TEXT_PARTS if isinstance(config.get(name), Mapping)), config)
    model_type = str(part.get("model_type") or config.get("model_type") or "unnamed")
    known = ARCHITECTURES.get(model_type)
    nested = part.get("attn_config")
    grouped = nested.get("kv_n_heads") if isinstance(nested, Mapping) else None
    attention = {"num_key_value_heads": grouped} if _is_count(grouped) else {}
    return {**(known.defaults if known else {}), **attention, **part}, model_type


def first(fields: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Return the first of the named fields that is set."""
    return next((int(fields[name]) for name in names if _is_count(fields.get(name))), None)


def required(fields: Mapping[str, Any], names: tuple[str, ...], model_type: str) -> int:
    """Return the first of the named fields that is set.

    Raises:
        ModelError: none is.
    """
    value = first(fields, names)
    if not value or value < 1:
        raise ModelError(f"this {model_type} config has none of {', '.join(names)}")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _num_kv_heads(fields: Mapping[str, Any], model_type: str, num_heads: int) -> int:
    is_multi_query = model_type in _MULTI_QUERY and fields.get("multi_query", True)
    if is_multi_query and not fields.get("new_decoder_architecture"):
        return 1
    return first(fields, _KV_HEADS) or num_heads


def _windows(fields: Mapping[str, Any], model_type: str, num_layers: int) -> tuple[int | None, ...]:
    if (known := ARCHITECTURES.get(model_type)) is not None:
        return tuple(layer.window for layer in layer_shapes({**fields, "num_hidden_layers": num_layers}, known))
    window = first(fields, ("sliding_window",)) if fields.get("use_sliding_window", True) else None
    listed = fields.get("layer_types")
    if listed is None:
        return (window,) * num_layers
    if unknown := sorted(set(listed) - {FULL_ATTENTION, SLIDING_ATTENTION}):
        raise ModelError(
            f"model_type {model_type!r} has no estimate: its layers of type {unknown[0]!r} keep another state"
        )
    return tuple(window if kind == SLIDING_ATTENTION else None for kind in listed[:num_layers])
