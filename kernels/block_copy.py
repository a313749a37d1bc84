"""Whole blocks of the KV cache: gathered into contiguous staging, scattered back, copied before they are written.

Blocks are [num_blocks, ..., row_elements], contiguous. Staging may be of another dtype than the cache: rows are
expanded and rounded as kernels/kv_rows.py says. Between equal dtypes the bytes are moved as they are.
"""

import torch
from torch import Tensor

from pdserve.kernels.kv_rows import expand_rows, pack_rows


def gather_blocks(
    blocks: Tensor,  # [num_blocks, ..., row_elements]
    block_ids: Tensor,  # [num_gathered] int64
    dtype: torch.dtype,
) -> Tensor:  # [num_gathered, ..., row_elements of dtype]
    """Return blocks one after another, converted to `dtype`."""
    return _converted(blocks[block_ids], dtype)


def scatter_blocks(
    staging: Tensor,  # [num_blocks of block_ids, ..., row_elements of its dtype]
    blocks: Tensor,  # [num_blocks, ..., row_elements]
    block_ids: Tensor,  # [num_scattered] int64, distinct
) -> None:
    """blocks[block_ids] = staging, converted to the cache's dtype."""
    blocks[block_ids] = _converted(staging, blocks.dtype)


def copy_blocks(
    blocks: Tensor,  # [num_blocks, ..., row_elements]
    source_ids: Tensor,  # [num_copied] int64
    target_ids: Tensor,  # [num_copied] int64, distinct and no sources
) -> None:
    """blocks[target_ids] = blocks[source_ids]: what a sequence does before it writes to a block that others hold."""
    blocks[target_ids] = blocks[source_ids]


def _converted(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    return blocks if blocks.dtype is dtype else pack_rows(expand_rows(blocks, torch.float32), dtype)
