"""Writing new keys and values into their slots of the paged KV cache."""

import torch
from torch import Tensor

from pdserve.kernels.kv_rows import pack_rows


def store_kv(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    kv_blocks: Tensor,  # [num_blocks, 2, num_kv_heads, block_size, row_elements], one layer of the cache
    slot_mapping: Tensor,  # [num_tokens] int64: block_id * block_size + offset
) -> None:
    """kv_blocks[slot // block_size, :, :, slot % block_size] = (key, value) as rows of the cache, in place."""
    block_size = kv_blocks.shape[3]
    block_ids = slot_mapping // block_size
    offsets = slot_mapping % block_size
    kv_blocks[block_ids, :, :, offsets] = pack_rows(torch.stack((key, value), dim=1), kv_blocks.dtype)
