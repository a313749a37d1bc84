"""Paged attention of one query token a sequence: what a decode step asks for, and the torch reference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.attention import AttentionSpan, paged_attention


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One token of each sequence. `max_context_len` is known on the host: a kernel's grid depends on it."""

    block_tables: Tensor  # [num_seqs, max_blocks] int32 or int64
    context_lens: Tensor  # [num_seqs] int32 or int64, with the new token; 0: the row's result is zeros
    max_context_len: int


def decode_attention(
    query: Tensor,  # [num_seqs, num_heads, head_dim]
    kv_blocks: Tensor,  # [num_blocks, 2, num_kv_heads, block_size, row_elements], one layer of the cache
    batch: DecodeBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,  # [num_heads] float32: scores get -slope * distance
    *,
    is_batch_invariant: bool = False,
) -> Tensor:  # [num_seqs, num_heads, head_dim]
    """Attend as `paged_attention` does for spans of one token; each is computed alone, so always batch-invariant."""
    output, block_size = torch.zeros_like(query), kv_blocks.shape[3]
    for row, context_len in enumerate(batch.context_lens.tolist()):
        if context_len:
            table = batch.block_tables[row, : -(-context_len // block_size)]
            span = [AttentionSpan(row, 1, context_len, table)]
            output[row] = paged_attention(query, kv_blocks, span, scale, window, soft_cap, alibi_slopes)[0]
    return output
