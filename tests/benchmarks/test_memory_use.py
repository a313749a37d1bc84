"""Memory that serves tokens, counted by the benchmark's own functions: of the pool, and of each sequence."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pdserve.engine.config import EngineConfig


@pytest.fixture
def memory(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("memory")


@pytest.mark.parametrize("block_size", [4, 16])
def test_the_pool_is_what_was_given_and_sequences_waste_less_than_a_block(
    memory: ModuleType, tiny_model: Callable[..., Path], block_size: int
) -> None:
    config = EngineConfig(
        model_dir=tiny_model(), block_size=block_size, kv_memory_bytes=500_000, max_num_seqs=32, growth_reserve=0.0
    )

    use = memory.count(config, num_requests=25, longest=50)

    assert use.given_bytes * 0.95 <= use.num_blocks * use.block_bytes <= use.given_bytes
    assert use.most_in_use >= 0.8 * use.num_blocks, "more was asked for than fits"
    assert use.num_seen > 100
    assert use.most_wasted < block_size


def test_weights_are_weighed_by_their_dtype(memory: ModuleType, tiny_model: Callable[..., Path]) -> None:
    model_dir = tiny_model()

    in_float32 = memory.weights_bytes(model_dir, "float32")

    embedding = 4 * 199 * 64
    assert in_float32 == sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    assert memory.weights_bytes(model_dir, "int8") == in_float32 / 4 + embedding
