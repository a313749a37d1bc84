"""Paged attention of prompt chunks: sequences cut into tiles of queries, and the torch reference."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.attention import AttentionSpan, paged_attention

_ROWS = 64
_ROWS_OF_FLOAT32 = 32  # whose products run without tensor cores, from registers


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Sequences of any query lengths, cut into tiles of equally many rows on the host."""

    block_tables: Tensor  # [num_seqs, max_blocks] int32 or int64
    tiles: Tensor  # [num_tiles, 4] int32: sequence, row of its first query, queries in the tile, position of the first

    @classmethod
    def of(
        cls,
        block_tables: Tensor,
        sequences: Sequence[tuple[int, int, int]],
        heads_per_kv_head: int,
        dtype: torch.dtype,
    ) -> "PrefillBatch":
        """Cut sequences given as (query_start, query_len, context_len), in the order of `block_tables`."""
        step = tile_rows(dtype, heads_per_kv_head) // heads_per_kv_head
        tiles = [
            (index, query_start + first, min(step, query_len - first), context_len - query_len + first)
            for index, (query_start, query_len, context_len) in enumerate(sequences)
            for first in range(0, query_len, step)
        ]
        return cls(block_tables, torch.tensor(tiles, dtype=torch.int32, device=block_tables.device).view(-1, 4))


def tile_rows(dtype: torch.dtype, heads_per_kv_head: int) -> int:
    """Return the rows of a tile, a power of two: those of one token at least."""
    own = 1 << (heads_per_kv_head - 1).bit_length()
    return max(_ROWS_OF_FLOAT32 if dtype is torch.float32 else _ROWS, own)


def prefill_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    kv_blocks: Tensor,  # [num_blocks, 2, num_kv_heads, block_size, row_elements], one layer of the cache
    batch: PrefillBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,  # [num_heads] float32: scores get -slope * distance
    output: Tensor | None = None,  # written where the batch has queries; a new tensor without
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """Attend as `paged_attention` does, tile by tile: a tile is the last queries of a context that ends with them."""
    output, block_size = torch.empty_like(query) if output is None else output, kv_blocks.shape[3]
    for sequence, start, num_queries, position in batch.tiles.tolist():
        context_len, own = position + num_queries, slice(start, start + num_queries)
        table = batch.block_tables[sequence, : -(-context_len // block_size)]
        span = [AttentionSpan(start, num_queries, context_len, table)]
        output[own] = paged_attention(query, kv_blocks, span, scale, window, soft_cap, alibi_slopes)
    return output
