"""The arithmetic of KV memory, by values known from elsewhere, and the ways in which configs say the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.config import EngineConfig
from pdserve.engine.errors import InvalidRequest, ModelError
from pdserve.engine.kv_shape import KVShape, count_parameters
from pdserve.engine.memory_estimate import MemoryEstimate
from pdserve.engine.model_config import stored_parameters
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.model_dir import ModelDir

_GIB = 2**30
_LLAMA_7B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
_QWEN3_8B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "head_dim": 128,
}


def test_a_token_of_32_layers_with_32_heads_of_128_is_half_a_mebibyte() -> None:
    numbers = _numbers(_LLAMA_7B)

    assert numbers.token_bytes == 524_288
    assert numbers.request_bytes(2048) == 1_073_741_824
    assert numbers.request_bytes(32_768) == 17_179_869_184


def test_qwen3_8b_has_eight_kv_heads() -> None:
    assert _numbers(_QWEN3_8B).token_bytes == 147_456


def test_a_40_gib_card_holds_22_whole_contexts_or_four_times_as_many_quarters() -> None:
    numbers, left = _numbers(_LLAMA_7B), (40 - 14 - 4) * _GIB

    assert numbers.num_preallocated(left, 2048) == 22
    assert numbers.num_paged(left, 512) == 88
    assert numbers.num_preallocated(-1, 2048) == 0


@pytest.mark.parametrize(("dtype", "expected"), [("float32", 294_912), ("int8", 76_032), ("fp8", 73_728)])
def test_dtype_of_kv_scales_it(dtype: str, expected: int) -> None:
    """int8 has a float32 scale beside each vector of 128."""
    assert MemoryEstimate(KVShape.from_config(_QWEN3_8B), dtype, 16).token_bytes == expected


def test_a_block_is_held_whole() -> None:
    numbers = _numbers(_QWEN3_8B)

    assert numbers.paged_bytes(1) == numbers.paged_bytes(16) == 16 * 147_456
    assert numbers.paged_bytes(17) == 32 * 147_456


@pytest.mark.parametrize(
    ("config", "kv_heads", "head_dim", "layers"),
    [
        ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}, 12, 64, 12),
        ({"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144}, 1, 128, 40),
        ({"model_type": "gpt_bigcode", "n_layer": 4, "n_head": 8, "n_embd": 64, "multi_query": False}, 8, 8, 4),
        ({"model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544}, 1, 64, 32),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 60,
                "num_attention_heads": 128,
                "num_kv_heads": 8,
                "hidden_size": 8192,
                "new_decoder_architecture": True,
            },
            *(8, 64, 60),
        ),
        (
            {"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096, "attn_config": {"kv_n_heads": 8}},
            8,
            128,
            32,
        ),
        ({"model_type": "mistral", "num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 4096}, 8, 128, 2),
        ({"model_type": "llava", "vision_config": {}, "text_config": _LLAMA_7B}, 32, 128, 32),
    ],
)
def test_every_family_names_its_sizes_in_its_own_way(
    config: dict[str, Any], kv_heads: int, head_dim: int, layers: int
) -> None:
    shape = KVShape.from_config(config)

    assert (shape.num_kv_heads, shape.head_dim, shape.num_layers) == (kv_heads, head_dim, layers)


def test_layers_with_a_window_are_known_and_held_whole() -> None:
    sizes = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 1152}
    listed = ["sliding_attention", "full_attention"] * 3
    configs = [
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **sizes, "sliding_window": 512}},
        {"model_type": "cohere2", **sizes, "sliding_window": 512, "layer_types": listed},
    ]

    shapes = [KVShape.from_config(config) for config in configs]

    assert shapes[0].windows == (512, 512, 512, 512, 512, None)
    assert shapes[1].windows == (512, None) * 3
    numbers = MemoryEstimate(shapes[1], "float16", 16)
    assert numbers.windowed_bytes(2048) == 3 * (512 + 2048) * numbers.layer_token_bytes
    assert numbers.request_bytes(2048) == 6 * 2048 * numbers.layer_token_bytes


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba"}, "'mamba'.*recurrent"),
        ({"model_type": "t5"}, "'t5'.*encoder-decoder"),
        ({**_LLAMA_7B, "model_type": "other", "kv_lora_rank": 512}, "'other'.*latent"),
        ({**_LLAMA_7B, "model_type": "other", "layer_types": ["linear_attention"] * 32}, "'other'.*linear_attention"),
        (
            {"model_type": "other", "num_attention_heads": 2, "hidden_size": 8},
            "other config has none of num_hidden_layers",
        ),
    ],
)
def test_what_is_not_keys_and_values_has_no_estimate(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        KVShape.from_config(config)


def test_wrong_dtype_is_named() -> None:
    with pytest.raises(InvalidRequest, match="kv_cache_dtype"):
        MemoryEstimate(KVShape.from_config(_LLAMA_7B), "int3", 16)


@pytest.mark.parametrize(("config", "billions"), [(_LLAMA_7B, 6.74), (_QWEN3_8B, 8.19)])
def test_parameters_are_counted_from_the_config(config: dict[str, Any], billions: float) -> None:
    assert count_parameters(config) == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True, "head_dim": 24}])
def test_the_estimate_is_what_the_engine_allocates(overrides: dict[str, Any], tiny_model: Any) -> None:
    model_dir: Path = tiny_model(**overrides)
    config = json.loads((model_dir / "config.json").read_text())

    runner = ModelRunner.load(EngineConfig(model_dir=model_dir, num_blocks=3), ModelDir.open(model_dir))

    numbers = MemoryEstimate(KVShape.from_config(config), "float32", 16)
    assert runner.kv_cache.block_size_bytes == numbers.paged_bytes(16)
    assert stored_parameters(model_dir) == pytest.approx(count_parameters(config), rel=0.02)


def _numbers(config: dict[str, Any]) -> MemoryEstimate:
    return MemoryEstimate(KVShape.from_config(config), "float16", 16)
