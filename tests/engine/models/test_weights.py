"""Loading: every parameter is there, known and of the right shape, or the start is refused with a sentence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.engine.errors import ModelError
from pdserve.engine.models.decoder_config import DecoderConfig
from pdserve.engine.models.layer_weights import DecoderWeights, MlpWeights
from pdserve.engine.models.model_dir import ModelDir
from pdserve.engine.models.weights import WeightFiles, load_decoder_weights


@pytest.fixture
def model_dir(tiny_model: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model(), tmp_path / "model"))


def _load(model_dir: Path) -> DecoderWeights:
    config = DecoderConfig.from_config(ModelDir.open(model_dir).config)
    return load_decoder_weights(WeightFiles.open(model_dir), config, torch.float32)


def _down(weights: DecoderWeights) -> torch.Tensor:
    mlp = weights.layers[0].mlp
    assert isinstance(mlp, MlpWeights)
    return mlp.down.weight


def _change(model_dir: Path, **config: Any) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def _tensors(model_dir: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(model_dir / "model.safetensors")
    return tensors


def _shard(model_dir: Path) -> dict[str, str]:
    tensors = _tensors(model_dir)
    weight_map = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name, where in weight_map.items() if where == file}, model_dir / file)
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_sharded_weights_equal_the_single_file(model_dir: Path) -> None:
    single = _load(model_dir)

    _shard(model_dir)
    (model_dir / "model.safetensors").unlink()

    assert torch.equal(_load(model_dir).layers[1].qkv.weight, single.layers[1].qkv.weight)


def test_missing_shard_is_named(model_dir: Path) -> None:
    """C146."""
    weight_map = _shard(model_dir)
    missing = min(weight_map.values())
    (model_dir / missing).unlink()

    with pytest.raises(ModelError, match=missing):
        _load(model_dir)


def test_files_and_tensors_outside_the_index_are_ignored(model_dir: Path) -> None:
    """C147: a stray old file beside the shards, and a shard that holds a tensor of another shard."""
    expected = _load(model_dir)
    weight_map = _shard(model_dir)
    stray = {name: torch.zeros_like(tensor) for name, tensor in _tensors(model_dir).items()}
    save_file(stray, model_dir / "model.safetensors")
    first = min(weight_map.values())
    other = next(name for name, file in weight_map.items() if file != first)
    held = load_file(model_dir / first)
    save_file({**held, other: stray[other]}, model_dir / first)

    loaded = _load(model_dir)

    assert torch.equal(loaded.embedding, expected.embedding)
    assert torch.equal(_down(loaded), _down(expected))
    assert torch.equal(loaded.layers[2].qkv.weight, expected.layers[2].qkv.weight)


def test_missing_parameter_is_named(model_dir: Path) -> None:
    tensors = _tensors(model_dir)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model_dir / "model.safetensors")

    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        _load(model_dir)


def test_unknown_parameter_is_refused_rather_than_served_without(model_dir: Path) -> None:
    tensors = _tensors(model_dir)
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(tensors, model_dir / "model.safetensors")

    with pytest.raises(ModelError, match="q_norm"):
        _load(model_dir)


def test_wrong_shape_is_named_with_both_shapes(model_dir: Path) -> None:
    _change(model_dir, intermediate_size=100)

    with pytest.raises(ModelError, match=r"gate_proj.*\(96, 64\).*\(100, 64\)"):
        _load(model_dir)


@pytest.mark.parametrize("stored", ["absent", "equal", "different"])
@pytest.mark.parametrize("tied", [True, False])
def test_output_head_follows_the_checkpoint(model_dir: Path, tied: bool, stored: str) -> None:
    """C145."""
    tensors = _tensors(model_dir)
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding.clone() if stored == "equal" else embedding.flip(0).contiguous()
    tensors["lm_head.weight"] = head
    if stored == "absent":
        del tensors["lm_head.weight"]
    save_file(tensors, model_dir / "model.safetensors")
    _change(model_dir, tie_word_embeddings=tied)

    if not tied and stored == "absent":
        with pytest.raises(ModelError, match="no output head"):
            _load(model_dir)
        return
    weights = _load(model_dir)

    assert torch.equal(weights.lm_head, embedding if stored == "absent" else head)
    if tied and stored != "different":
        assert weights.lm_head is weights.embedding


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba"}, "mamba.*recurrent"),
        ({"model_type": "t5"}, "t5.*encoder-decoder"),
        ({"model_type": "unheard_of", "is_encoder_decoder": True}, "unheard_of.*encoder-decoder"),
        ({"model_type": "llama", "is_encoder_decoder": True}, "llama.*encoder-decoder"),
        ({"model_type": "bert"}, "bert.*encoder"),
        ({"model_type": "deepseek_v3"}, "deepseek_v3.*latent"),
        ({"model_type": "llava", "vision_config": {}}, "llava.*multimodal"),
        ({"model_type": "unheard_of"}, "unheard_of.*supported types: .*qwen3"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "gemma2.*both directions"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types lists 1"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers lists 1"),
        ({"model_type": "mixtral", "num_local_experts": 1}, "num_experts_per_tok 2 .* 1 experts"),
        ({"hidden_size": None, "head_dim": 8, "num_attention_heads": 3}, "3 is not a multiple of 2"),
        ({"hidden_act": "xielu"}, "xielu"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantiz"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(model_dir: Path, config: dict[str, Any], words: str) -> None:
    _change(model_dir, **config)

    with pytest.raises(ModelError, match=words):
        DecoderConfig.from_config(ModelDir.open(model_dir).config)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 500.0, "rope_parameters": None},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0, "rope_parameters": None},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    ],
)
def test_every_way_to_write_rope_means_the_same(model_dir: Path, rope: dict[str, Any]) -> None:
    """C151."""
    _change(model_dir, **rope)

    config = DecoderConfig.from_config(ModelDir.open(model_dir).config)

    assert (config.rope.rope_type, config.rope.theta, config.rope.parameters["factor"]) == ("linear", 500.0, 2.0)


def test_end_of_sequence_is_the_union_of_all_sources(model_dir: Path) -> None:
    """C045, C046."""
    _change(model_dir, eos_token_id=5)
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "<end>", "id": 8}]}
    (model_dir / "tokenizer.json").write_text(json.dumps(tokenizer))

    assert ModelDir.open(model_dir).eos_token_ids() == {5, 6, 7, 8}


def test_identity_changes_with_one_weight(model_dir: Path) -> None:
    """C133: blocks are known by the weights that made them, whatever the name under which those were loaded."""
    before = ModelDir.open(model_dir).digest()
    tensors = _tensors(model_dir)
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, model_dir / "model.safetensors")

    assert ModelDir.open(model_dir).digest() != before
