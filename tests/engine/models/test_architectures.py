"""What a config may leave out means what transformers takes it to mean; composed configs give their text part."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from pdserve.engine.errors import ModelError
from pdserve.engine.models.architectures import ARCHITECTURES
from pdserve.engine.models.decoder_config import DecoderConfig
from pdserve.engine.models.model_dir import ModelDir
from pdserve.engine.models.rope import RopeConfig
from pdserve.engine.models.weights import WeightFiles, load_decoder_weights

_SIZES = {
    "vocab_size": 199,
    "hidden_size": 2048,
    "intermediate_size": 96,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
}


@pytest.mark.parametrize("uses_window", [False, True])
@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES.keys() - {"gemma3"}))
def test_a_sparse_config_means_what_the_complete_one_does(model_type: str, uses_window: bool) -> None:
    switch = ARCHITECTURES[model_type].window_switch
    fields = {**_SIZES, **({switch: uses_window} if switch else {})}
    if model_type == "smollm3":
        fields["sliding_window"] = 64
    complete = json.loads(AutoConfig.for_model(model_type, **fields).to_json_string(use_diff=False))

    sparse = DecoderConfig.from_config({"model_type": model_type, **fields})

    expected = DecoderConfig.from_config(complete)
    for name in DecoderConfig.__slots__:
        if name != "ropes":
            assert getattr(sparse, name) == getattr(expected, name), name
    assert [_rotation(rope) for rope in sparse.ropes] == [_rotation(rope) for rope in expected.ropes]
    assert any(layer.window for layer in sparse.layers) or not (switch and uses_window)


def test_gemma3_patterns() -> None:
    """Five local layers, then a global one; each kind with its own rotation, in the old and the new way to write it."""
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
        }
    }

    configs = [DecoderConfig.from_config({"model_type": "gemma3_text", **_SIZES, **rope}) for rope in (old, new)]

    for config in configs:
        assert [layer.window for layer in config.layers[:7]] == [4096] * 5 + [None, 4096]
        assert [layer.rope for layer in config.layers[:7]] == [1] * 5 + [0, 1]
        assert [(rope.rope_type, rope.theta) for rope in config.ropes] == [("linear", 5e5), ("default", 2e3)]


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_longrope_under_its_old_names(name: str) -> None:
    """C151."""
    scaling = {"type": name, "long_factor": [2.0] * 32, "short_factor": [1.0] * 32}
    config = {"model_type": "phi3", **_SIZES, "rope_scaling": scaling, "max_position_embeddings": 131072}

    rope = DecoderConfig.from_config(config).rope

    assert rope.rope_type == "longrope"
    assert rope.parameters["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_composed_checkpoint(prefix: str, gemma3_dir: Path, tmp_path: Path) -> None:
    composed = _composed(gemma3_dir, tmp_path, prefix)

    weights, config = _load(composed)

    expected, expected_config = _load(gemma3_dir)
    assert config.layers == expected_config.layers
    assert torch.equal(weights.layers[1].qkv.weight, expected.layers[1].qkv.weight)
    assert weights.lm_head is weights.embedding


def test_vision_weights_are_refused(gemma3_dir: Path, tmp_path: Path) -> None:
    composed = _composed(gemma3_dir, tmp_path, "language_model.model.")
    tensors = load_file(composed / "model.safetensors")
    save_file({**tensors, "vision_tower.patch.weight": torch.ones(2)}, composed / "model.safetensors")

    with pytest.raises(ModelError, match=r"gemma3 .*multimodal .*vision_tower\.patch\.weight"):
        _load(composed)


@pytest.mark.parametrize("model_type", ["qwen2", "starcoder2"])
def test_a_bias_that_the_config_promises_must_be_there(model_type: str, tiny_model: Any, tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(tiny_model(model_type), tmp_path / "model"))
    tensors = load_file(model_dir / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    save_file(tensors, model_dir / "model.safetensors")

    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.k_proj\.bias is missing"):
        _load(model_dir)


@pytest.fixture
def gemma3_dir(tiny_model: Any) -> Path:
    return Path(tiny_model("gemma3_text", head_dim=16, sliding_window=8, sliding_window_pattern=2))


def _composed(model_dir: Path, target: Path, prefix: str) -> Path:
    text = json.loads((model_dir / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    tensors = load_file(model_dir / "model.safetensors")
    renamed = {f"{prefix}{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}
    save_file(renamed, target / "model.safetensors")
    return target


def _load(model_dir: Path) -> Any:
    config = DecoderConfig.from_config(ModelDir.open(model_dir).config)
    return load_decoder_weights(WeightFiles.open(model_dir), config, torch.float32), config


def _rotation(rope: RopeConfig) -> tuple[str, float, int, int]:
    return rope.rope_type, rope.theta, rope.rotary_dim, rope.max_position_embeddings
