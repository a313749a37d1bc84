"""Writing new keys and values into their slots of the paged KV cache."""

import torch
from torch import Tensor

from pdserve.kernels.kv_rows import pack_rows


def store_kv(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    kv_blocks: Tensor,  # [num_blocks, 2, num_kv_heads, block_size, row_elements], one layer of the cache
    slot_mapping: Tensor,  # [num_tokens] int64: block_id * block_size + offset; negative: a padded row, not written
) -> None:
    """kv_blocks[slot // block_size, :, :, slot % block_size] = (key, value) as rows of the cache, in place."""
    block_size, is_written = kv_blocks.shape[3], slot_mapping >= 0
    slots, rows = slot_mapping[is_written], torch.stack((key, value), dim=1)[is_written]
    kv_blocks[slots // block_size, :, :, slots % block_size] = pack_rows(rows, kv_blocks.dtype)
