"""What the limits of a model are made of: bytes of a token, operations of a prompt."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pdserve.engine.models.decoder_config import DecoderConfig
from pdserve.engine.models.model_dir import ModelDir


def test_work_follows_the_shape_of_the_model(load: Callable[[str], ModuleType], tiny_model: Any) -> None:
    model_dir: Path = tiny_model("llama")
    config = DecoderConfig.from_config(ModelDir.open(model_dir).config)
    work = load("limits").Work(config, weight_bytes=1, kv_bytes=2)

    weights = sum(rows * columns for rows, columns in work.matrices) * config.num_layers
    head = config.vocab_size * config.hidden_size
    assert len(work.matrices) == 4
    assert work.layer_weights == weights
    assert work.token_bytes(0) == weights + head
    per_position = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    assert work.token_bytes(10) - work.token_bytes(0) == 10 * per_position
    attention_of_two = 4 * config.num_layers * config.num_heads * config.head_dim * 3
    assert work.prompt_operations(2) == 4 * weights + attention_of_two + 2 * head
