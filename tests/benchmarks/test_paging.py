"""What blocks and the KV cache save, counted on the engine by the benchmark's own functions."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def paging(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("paging")


def test_blocks_hold_tokens_where_reserved_memory_is_empty(paging: ModuleType, tmp_path: Path) -> None:
    """The first requests of the trace of which a quarter of the lengths is taken, to be quick."""
    lengths = [(prompt // 4 + 1, output // 4 + 1) for prompt, output in list(paging.read_lengths(paging._LENGTHS))[:24]]
    model_dir = paging.tiny_checkpoint(tmp_path, 2048)

    held = paging.measure_memory(model_dir, lengths, context=2048, num_slots=4096)

    assert held.num_tokens / held.num_slots > 0.94
    assert held.num_tokens / held.num_reserved < 0.3
    assert held.num_sequences / held.num_steps > 2 * (4096 / 2048)


@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_n_tokens_need_2n_keys_and_values_with_a_cache_and_n_times_n_plus_1_without(
    num_tokens: int, paging: ModuleType, tmp_path: Path
) -> None:
    model_dir = paging.tiny_checkpoint(tmp_path, 2048)

    counts = [paging.count_computed(model_dir, num_tokens, has_cache)[0] for has_cache in (True, False)]

    assert counts == [2 * num_tokens, num_tokens * (num_tokens + 1)]
