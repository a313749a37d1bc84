"""Whether a model of transformers may be served through paged attention: refused with a sentence, never served wrong.

Three times: by its config, by its class, and by a probe, in which each layer must ask for attention once and the logits
must be those of transformers' own eager attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.errors import ModelError
from pdserve.engine.kv_shape import KVShape
from pdserve.engine.models.refusals import why_not_decoder
from pdserve.engine.models.transformers_attention import ATTENTION_NAME, LayerCall, RecordingStep, StepSlot

_PROBE_LEN = 24
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # rms of the error over that of the logits
_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
_OWN_INPUTS = ("vision", "audio", "speech", "image", "video")


@dataclass(frozen=True, slots=True)
class AdaptedShape:
    """The sizes that the engine needs of a model whose code is transformers'."""

    model_type: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_len: int


def refuse_unfit_config(config: Mapping[str, Any]) -> None:
    """Raise ModelError for what the config alone says."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = str(config.get("model_type"))
    reason = why_not_decoder(config, model_type)
    if not reason and any(isinstance(config[key], dict) and key.startswith(_OWN_INPUTS) for key in config):
        reason = ": it is multimodal, and only text models are served"
    if not reason and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        own = ": it needs code of its own (auto_map), and code from a model directory is not run (trust_remote_code)"
        reason = own if config.get("auto_map") else ": transformers has no causal language model of this type"
    if not reason and config.get("quantization_config"):
        reason = ": quantized checkpoints (quantization_config) are not served; use the original weights"
    if not reason and config.get("attention_chunk_size"):
        reason = ": its layers attend in chunks (attention_chunk_size)"
    if not reason and (kinds := _rope_types(config) & _LENGTH_DEPENDENT):
        reason = f": its rotations depend on the longest sequence of a batch (rope type {min(kinds)})"
    if reason:
        raise ModelError(f"model_type {model_type!r} is not supported{reason}")


def refuse_unfit_class(model_type: str, model_class: Any, parameters: Mapping[str, Any]) -> None:
    """Raise ModelError if the class keeps other state than keys and values, or cannot be asked for single rows."""
    reason = ""
    if getattr(model_class, "_is_stateful", False):
        reason = "it keeps recurrent state, which paged KV blocks cannot hold"
    elif missing := {"position_ids", "logits_to_keep"} - set(parameters):
        reason = f"its code takes no {sorted(missing)[0]}, so that sequences cannot share a batch without padding"
    if reason:
        raise ModelError(f"model_type {model_type!r} is not supported: {reason}")


def check_loading(model_type: str, report: Mapping[str, Any]) -> None:
    """Raise ModelError unless every parameter came from the checkpoint, and every tensor of it was used."""
    for problem, what in (
        ("missing_keys", "missing from the checkpoint"),
        ("mismatched_keys", "of another shape than the config says"),
        ("unexpected_keys", "unknown to the model"),
    ):
        if names := sorted(str(name) for name in report.get(problem, ())):
            raise ModelError(f"this {model_type} checkpoint: parameters {what}: {', '.join(names[:5])}")


@torch.inference_mode()
def probe(model_type: str, model: Any, slot: StepSlot) -> AdaptedShape:
    """Run a short prompt with eager attention and with ours, compare, and leave the model with ours.

    Raises:
        ModelError: the layers do not ask for attention once each, or the logits differ.
    """
    config = model.config.get_text_config()
    context_len = getattr(config, "max_position_embeddings", None)
    if not isinstance(context_len, int):
        raise ModelError(f"this {model_type} config has no max_position_embeddings: its context is not known")
    num_tokens = min(_PROBE_LEN, context_len)
    token_ids = torch.randint(0, int(config.vocab_size), (1, num_tokens), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(num_tokens).unsqueeze(0)
    expected = model(input_ids=token_ids, position_ids=positions, use_cache=False).logits[0].float()
    model.set_attn_implementation(ATTENTION_NAME)
    step = RecordingStep()
    try:
        with slot.filled(step):
            ours = model(input_ids=token_ids, position_ids=positions, use_cache=False).logits[0]
    except ModelError as error:
        raise ModelError(f"model_type {model_type!r} is not supported: {error}") from error
    _check_layers(model_type, step.calls, int(config.num_hidden_layers))
    _check_windows(model_type, step.calls, config.to_dict(), context_len)
    _check_logits(model_type, ours.float(), expected, model.dtype)
    keys = step.calls[0].key
    return AdaptedShape(model_type, len(step.calls), keys.shape[1], keys.shape[2], ours.shape[-1], context_len)


def _check_layers(model_type: str, calls: list[LayerCall], num_layers: int) -> None:
    if len(calls) > num_layers:
        raise ModelError(
            f"model_type {model_type!r} is not supported: its {num_layers} layers attend {len(calls)} times, and a "
            "layer of the KV cache holds the keys and values of one"
        )
    if [call.layer for call in calls] != list(range(num_layers)):
        raise ModelError(
            f"model_type {model_type!r} is not supported: {len(calls)} of its {num_layers} layers ask transformers' "
            "attention interface; the others attend in their own code (ALiBi, for one) or keep other state"
        )
    if len({call.key.shape for call in calls}) > 1:
        raise ModelError(f"model_type {model_type!r} is not supported: its layers have KV heads of different shapes")


def _check_windows(model_type: str, calls: list[LayerCall], fields: dict[str, Any], context_len: int) -> None:
    """A window that the config names must be one that attention is told of: a mask made elsewhere would be lost."""
    for call, window in zip(calls, KVShape.from_config(fields).windows, strict=True):
        if window is not None and window < context_len and call.window != window:
            raise ModelError(
                f"model_type {model_type!r} is not supported: layer {call.layer} should look back {window} tokens, "
                f"but its code asks for {call.window or 'all'}"
            )


def _check_logits(model_type: str, ours: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    spread = (expected - expected.mean()).square().mean().sqrt()
    error = (ours - expected).square().mean().sqrt()
    if not bool(error <= _TOLERANCE[dtype] * spread):
        raise ModelError(
            f"model_type {model_type!r} is not supported: with paged attention its logits differ from transformers' own"
        )


def _rope_types(config: Mapping[str, Any]) -> set[str]:
    """The rope types of all layers; a config may have one for each type of layer, and a text part."""
    places = [config, config.get("text_config") or {}]
    found = [place.get(name) or {} for place in places for name in ("rope_parameters", "rope_scaling")]
    each = [*found, *(part for parameters in found for part in parameters.values() if isinstance(part, Mapping))]
    return {str(part.get("rope_type") or part.get("type") or "default") for part in each}
