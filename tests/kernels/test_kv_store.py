"""New keys and values land in their slots, and nowhere else."""

import pytest
import torch

from pdserve.kernels.kv_store import store_kv


@pytest.mark.parametrize("block_size", [8, 13, 16, 128])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 256), (3, 40), (9, 64)])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_each_token_is_in_its_slot_and_the_rest_is_untouched(
    block_size: int, num_kv_heads: int, head_dim: int, num_tokens: int
) -> None:
    kv_blocks = torch.full((7, 2, num_kv_heads, block_size, head_dim), 5.0)
    slots = torch.randperm(7 * block_size, generator=torch.Generator().manual_seed(1))[:num_tokens]
    key, value = torch.randn(2, num_tokens, num_kv_heads, head_dim)
    expected = kv_blocks.clone()
    for token, slot in enumerate(slots.tolist()):
        for head in range(num_kv_heads):
            expected[slot // block_size, 0, head, slot % block_size] = key[token, head]
            expected[slot // block_size, 1, head, slot % block_size] = value[token, head]

    store_kv(key, value, kv_blocks, slots)

    assert torch.equal(kv_blocks, expected)


def test_one_layer_of_a_cache_that_lies_block_by_block() -> None:
    """The layer's view is not contiguous; its neighbours stay as they are."""
    blocks = torch.zeros(4, 3, 2, 2, 8, 16)
    key, value = torch.randn(2, 2, 2, 16)

    store_kv(key, value, blocks[:, 1], torch.tensor([9, 30]))

    assert torch.equal(blocks[1, 1, 0, :, 1], key[0])
    assert torch.equal(blocks[3, 1, 1, :, 6], value[1])
    assert not blocks[:, 0].any()
    assert not blocks[:, 2].any()


def test_a_row_of_padding_is_not_written() -> None:
    blocks, key = torch.zeros(2, 2, 1, 8, 4), torch.ones(2, 1, 4)

    store_kv(key, key, blocks, torch.tensor([-1, 9]))

    assert blocks.sum() == blocks[1, :, :, 1].sum() == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_rounded_to_the_dtype_of_the_cache(dtype: torch.dtype) -> None:
    kv_blocks = torch.zeros(1, 2, 1, 8, 4, dtype=dtype)
    key, value = torch.randn(2, 1, 1, 4)

    store_kv(key, value, kv_blocks, torch.tensor([3]))

    assert torch.equal(kv_blocks[0, 0, 0, 3], key[0, 0].to(dtype))
    assert torch.equal(kv_blocks[0, 1, 0, 3], value[0, 0].to(dtype))
