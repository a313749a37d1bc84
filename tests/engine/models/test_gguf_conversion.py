"""A GGUF file as llama.cpp's converter writes it gives the weights, logits and token ids of the original."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pdserve.engine.model_source import resolve_model

_TEXTS = (
    "The river rises in the hills, and runs through 3 towns!\n\n  def f(x):\n\treturn x ** 2",
    "日本の首都は東京です。Größe, naïve café",
    "👩‍👩‍👧 emoji <|im_start|>user and <|im_end|>",
)
_HEADS, _KV_HEADS = 4, 2


def _trained_tokenizer() -> Tokenizer:
    """Byte-level BPE with two special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXTS * 4, trainer)
    specials = [AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of each head from two halves to pairs, as llama.cpp stores what it rotates."""
    rows, columns = weight.shape
    halves = weight.view(num_heads, 2, rows // num_heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def _write_gguf(path: Path, tensors: dict[str, torch.Tensor], shape: dict[str, Any], tokenizer: Tokenizer) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(shape["hidden_size"] // _HEADS)
    writer.add_vocab_size(shape["vocab_size"])
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(size)]
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    kinds = [gguf.TokenType.CONTROL if token.startswith("<|") else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(size - 2)
    writer.add_eos_token_id(size - 1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape["num_hidden_layers"])
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            tensor = _permuted(tensor, _HEADS)
        elif name.endswith("k_proj.weight"):
            tensor = _permuted(tensor, _KV_HEADS)
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None, name
        writer.add_tensor(target, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_weights_and_token_ids_are_those_of_the_original(tiny_model: Any, tmp_path: Path) -> None:
    """C155, C156: fewer KV heads than heads, rows of queries and keys permuted; text, code, CJK, emoji, specials."""
    tokenizer = _trained_tokenizer()
    model_dir = tiny_model("llama", vocab_size=tokenizer.get_vocab_size())
    shape = json.loads((model_dir / "config.json").read_text())
    original = load_file(model_dir / "model.safetensors")
    path = tmp_path / "tiny.gguf"
    _write_gguf(path, original, shape, tokenizer)

    converted = resolve_model(str(path), progress=lambda line: None, models_dir=tmp_path / "models")

    weights = load_file(converted / "model.safetensors")
    assert weights.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(weights[name], tensor), name
    own = Tokenizer.from_file(str(converted / "tokenizer.json"))
    for text in _TEXTS:
        assert own.encode(text, add_special_tokens=False).ids == tokenizer.encode(text, add_special_tokens=False).ids
