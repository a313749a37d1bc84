"""The decoder against transformers: logits over odd chunks and decode steps, several lengths in one batch."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.engine.block_pool import BlockId
from pdserve.engine.config import EngineConfig
from pdserve.engine.model_input import ModelInput
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.model_dir import ModelDir
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduled_batch import ScheduledBatch, ScheduledSpan

TokenIds = tuple[int, ...]

_BLOCK_SIZE = 8
_NUM_DECODE_STEPS = 32
_WINDOW = 8
_PROMPT_LENS = (29, 11)
_EDGE_PROMPT_LENS = (_WINDOW - 1, _WINDOW, _WINDOW + 1, 4 * _WINDOW)

_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {}),
    "three-kv-heads-of-nine": (
        "llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "head-dim-40": ("llama", {"hidden_size": 80, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "head-dim-not-hidden-over-heads": (
        "llama",
        {"hidden_size": 40, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": _WINDOW}),
    "qwen2-biases": ("qwen2", {"use_sliding_window": False}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3-window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 2, "attention_bias": True},
    ),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": _WINDOW}),
    "gemma2-scale-and-caps": (
        "gemma2",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 512,
        },
    ),
    "gemma3-local-and-global": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": _WINDOW, "num_hidden_layers": 7, "query_pre_attn_scalar": 16},
    ),
    "gemma3-linear-rope-on-global": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": _WINDOW,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": _WINDOW}),
    "phi3-longrope-partial-crossing-limit": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "partial_rotary_factor": 0.75,
                "long_factor": [1.0 + 0.3 * i for i in range(6)],
                "short_factor": [1.0 + 0.1 * i for i in range(6)],
                "rope_theta": 1e4,
            },
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3-window-on-unrotated": (
        "smollm3",
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": _WINDOW, "attention_bias": True},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "logits_scaling": 4.0,
            "mlp_bias": True,
        },
    ),
    "olmo2": ("olmo2", {}),
    "starcoder2-window": ("starcoder2", {"sliding_window": _WINDOW}),
    "starcoder2-no-bias": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False, "hidden_act": "gelu"}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel-head-norms": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": ("mixtral", {"num_local_experts": 3, "sliding_window": _WINDOW}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2-moe-window": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": _WINDOW,
        },
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": _WINDOW,
        },
    ),
    "rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "rope-dynamic-below-limit": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "rope-dynamic-crossing-limit": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
            "max_position_embeddings": 32,
        },
    ),
    "rope-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
            }
        },
    ),
    "rope-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 5e5,
            }
        },
    ),
    "rope-longrope-crossing-limit": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "long_factor": [1.0 + 0.3 * i for i in range(8)],
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "original_max_position_embeddings": 32,
                "rope_theta": 1e4,
            }
        },
    ),
}

# Computed by transformers' own modelling code over our paged attention.
_GPT_NAMES = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512}
_ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT_NAMES),
    "gpt2-scale-by-layer": ("gpt2", {**_GPT_NAMES, "scale_attn_by_inverse_layer_idx": True}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "glm4": ("glm4", {"head_dim": 16}),
    "gptj": ("gptj", {**_GPT_NAMES, "rotary_dim": 8}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_bigcode-one-kv-head": ("gpt_bigcode", _GPT_NAMES),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "starcoder2-window": ("starcoder2", {"sliding_window": _WINDOW}),
    "cohere2-window-by-layer": ("cohere2", {"sliding_window": _WINDOW, "sliding_window_pattern": 2}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("shape", list(_ADAPTED))
def test_logits_through_transformers_code_equal_transformers(shape: str, tiny_model: Any) -> None:
    model_type, overrides = _ADAPTED[shape]
    model_dir = tiny_model(model_type, **overrides)

    _assert_equal_to_transformers(model_dir, _PROMPT_LENS, 7, "transformers")


@pytest.mark.parametrize("shape", list(_SHAPES))
@pytest.mark.parametrize("chunk", [7, 64])
def test_logits_equal_transformers(shape: str, chunk: int, tiny_model: Any) -> None:
    """C148, C150."""
    model_type, overrides = _SHAPES[shape]
    model_dir = tiny_model(model_type, **overrides)

    _assert_equal_to_transformers(model_dir, _PROMPT_LENS, chunk)


@pytest.mark.parametrize("shape", ["mistral-window", "qwen2-window", "gemma2", "gemma3-linear-rope-on-global"])
@pytest.mark.parametrize("chunk", [3, 64])
def test_window_edges_equal_transformers(shape: str, chunk: int, tiny_model: Any) -> None:
    """C153, C154: prompts of W-1, W, W+1 and 4 W tokens, decoded to beyond 8 W."""
    model_type, overrides = _SHAPES[shape]
    model_dir = tiny_model(model_type, **overrides)

    _assert_equal_to_transformers(model_dir, _EDGE_PROMPT_LENS, chunk)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", ["llama-gqa", "qwen3", "gemma2", "gemma3-local-and-global", "olmo2", "granite"])
def test_16_bit_error_is_that_of_transformers(shape: str, dtype: str, tiny_model: Any) -> None:
    model_type, overrides = _SHAPES[shape]
    model_dir = tiny_model(model_type, **overrides)
    prompts, forced = _tokens(_PROMPT_LENS)
    exact = [_reference_logits(model_dir, p, f) for p, f in zip(prompts, forced, strict=True)]
    theirs = [_reference_logits(model_dir, p, f, getattr(torch, dtype)) for p, f in zip(prompts, forced, strict=True)]

    ours = _our_logits(model_dir, prompts, forced, 7, dtype)

    for our, their, right in zip(ours, theirs, exact, strict=True):
        assert (our - right).square().mean().sqrt() < 1.5 * (their - right).square().mean().sqrt()


def _assert_equal_to_transformers(
    model_dir: Path, prompt_lens: tuple[int, ...], chunk: int, model_impl: str = "auto"
) -> None:
    prompts, forced = _tokens(prompt_lens)
    expected = [_reference_logits(model_dir, p, f) for p, f in zip(prompts, forced, strict=True)]

    actual = _our_logits(model_dir, prompts, forced, chunk, model_impl=model_impl)

    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def _tokens(prompt_lens: tuple[int, ...]) -> tuple[list[TokenIds], list[TokenIds]]:
    """Return prompts, and what follows them whatever the logits say."""
    generator = torch.Generator().manual_seed(7)

    def draw(length: int) -> TokenIds:
        return tuple(torch.randint(3, 199, (length,), generator=generator).tolist())

    return [draw(length) for length in prompt_lens], [draw(_NUM_DECODE_STEPS) for _ in prompt_lens]


@functools.cache
def _reference_logits(
    model_dir: Path, prompt: TokenIds, forced: TokenIds, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Logits after the prompt and after each forced token, computed as `generate` would: prompt, then single steps."""
    model = _reference(model_dir, dtype)
    rows = []
    with torch.inference_mode():
        step = model(torch.tensor([list(prompt)]), use_cache=True)
        for token_id in forced:
            rows.append(step.logits[0, -1].float())
            step = model(torch.tensor([[token_id]]), cache=step.cache, use_cache=True)
    return torch.stack(rows)


@functools.lru_cache(maxsize=2)
def _reference(model_dir: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager").eval()


def _our_logits(
    model_dir: Path,
    prompts: list[TokenIds],
    forced: list[TokenIds],
    chunk: int,
    dtype: str = "float32",
    model_impl: str = "auto",
) -> list[torch.Tensor]:
    num_blocks = 9  # interleaved tables: no sequence has its blocks in a row
    config = EngineConfig(
        model_dir=model_dir,
        dtype=dtype,
        model_impl=model_impl,
        block_size=_BLOCK_SIZE,
        num_blocks=num_blocks * len(prompts),
    )
    runner = ModelRunner.load(config, ModelDir.open(model_dir))
    tokens = [prompt + extra for prompt, extra in zip(prompts, forced, strict=True)]
    tables = [
        tuple(BlockId(len(prompts) * index + which) for index in range(num_blocks)) for which in range(len(prompts))
    ]
    computed = [0] * len(prompts)
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(len(row) < _NUM_DECODE_STEPS for row in rows):
        spans = []
        for which, prompt in enumerate(prompts):
            if len(rows[which]) < _NUM_DECODE_STEPS:
                end = (
                    min(computed[which] + chunk, len(prompt)) if computed[which] < len(prompt) else computed[which] + 1
                )
                spans.append(_span(which, tokens[which], computed[which], end, len(prompt), tables[which]))
                computed[which] = end
        logits = runner.run(ModelInput.build(ScheduledBatch(tuple(spans)), _BLOCK_SIZE))
        sampling = [int(span.seq_id) for span in spans if span.sampling is not None]
        for row, which in zip(logits, sampling, strict=True):
            rows[which].append(row)
    return [torch.stack(row) for row in rows]


def _span(
    which: int, tokens: TokenIds, start: int, end: int, num_prompt: int, table: tuple[BlockId, ...]
) -> ScheduledSpan:
    return ScheduledSpan(
        seq_id=str(which),
        start=start,
        token_ids=tokens[start:end],
        num_prompt_tokens=num_prompt,
        block_table=table[: -(-end // _BLOCK_SIZE)],
        sampling=SamplingParams(seed=0) if end >= num_prompt else None,
        output_position=max(end - num_prompt, 0),
    )
