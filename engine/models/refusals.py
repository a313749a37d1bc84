"""Why a model is not served, said before anything is loaded."""

from collections.abc import Mapping
from typing import Any

from pdserve.engine.errors import ModelError
from pdserve.engine.models.architectures import ARCHITECTURES


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


_ENCODER_DECODER = _types(
    """
    bart bigbird_pegasus blenderbot encoder_decoder fsmt led longt5 m2m_100 marian mbart mt5 mvp nllb_moe
    pegasus pegasus_x plbart prophetnet seamless_m4t speech_to_text switch_transformers t5 t5gemma udop umt5
    whisper
    """
)
_ENCODER = _types(
    """
    albert bert camembert deberta deberta_v2 distilbert electra eurobert longformer modernbert mpnet roberta
    xlm_roberta
    """
)
_RECURRENT = _types(
    """
    bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax
    nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm zamba zamba2
    """
)
_LATENT = _types(
    """
    deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite longcat_flash minicpm3 mistral4
    """
)
_MODALITIES = ("vision_config", "audio_config", "vision_tower", "speech_config")


def refuse_unsupported(config: Mapping[str, Any], model_type: str) -> None:
    """Raise for what can be known from the config alone.

    Raises:
        ModelError: a sentence that names the model type and the reason.
    """
    if model_type not in ARCHITECTURES:
        raise ModelError(f"model_type {model_type!r} is not supported{why_not_decoder(config, model_type)}{_known()}")
    if config.get("is_encoder_decoder"):
        raise ModelError(f"this {model_type} model is an encoder-decoder (is_encoder_decoder), which is not supported")
    text: Mapping[str, Any] = config.get("text_config") or config
    if text.get("use_bidirectional_attention"):
        raise ModelError(f"this {model_type} model attends in both directions: it embeds text and generates none")
    if config.get("quantization_config") or text.get("quantization_config"):
        raise ModelError("quantized checkpoints (quantization_config) are not supported; use the original weights")


def refuse_modalities(model_type: str, names: frozenset[str]) -> None:
    """Raise if the checkpoint has weights for other inputs than text.

    Raises:
        ModelError: a sentence that names the model type and one such weight.
    """
    for part in ("vision_tower.", "multi_modal_projector.", "audio_tower.", "visual."):
        found = sorted(name for name in names if name.startswith((part, f"model.{part}")))
        if found:
            raise ModelError(
                f"this {model_type} checkpoint is multimodal (it holds {found[0]}); only text models are supported: "
                "save its text part alone, for Gemma 3 as model_type gemma3_text"
            )


def why_not_decoder(config: Mapping[str, Any], model_type: str) -> str:
    """Return ": " and why a model of this type cannot be served from paged keys and values; "" if nothing is known."""
    if model_type in _ENCODER_DECODER or config.get("is_encoder_decoder"):
        return ": it is an encoder-decoder, and only decoders are served"
    if model_type in _RECURRENT:
        return ": it keeps recurrent (state-space or linear-attention) state, which paged KV blocks cannot hold"
    if model_type in _LATENT:
        return ": its multi-head latent attention does not keep keys and values per head"
    if model_type in _ENCODER:
        return ": it is an encoder and generates no text"
    if any(key in config for key in _MODALITIES):
        return ": it is multimodal, and only text models are served"
    return ""


def _known() -> str:
    return f"; supported types: {', '.join(sorted(ARCHITECTURES))}"
