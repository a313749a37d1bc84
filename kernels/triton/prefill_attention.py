"""Paged attention of prompt chunks: each query sees the cached prefix and its own chunk up to itself.

A program computes a tile of rows, a row being one query head of one token: the heads that share a KV head lie side by
side, so that a tile of keys is read once for all of them.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-any-return,attr-defined"

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.prefill_attention import PrefillBatch, tile_rows
from pdserve.kernels.triton.attention_tile import attend_tile
from pdserve.kernels.triton.rows import RowFormat, product_dtype

_TILE = 64
_TILE_OF_WIDE_ROWS = 32  # of head_dim > 128, float32 or int8: what fits registers and shared memory of an sm_80
_TILE_OF_WIDEST_ROWS = 16  # float32 of head_dim > 128: with 32 it spills kilobytes a thread


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
    """Attend as kernels.prefill_attention.prefill_attention does; the chunk's keys and values are in the cache already.

    Always batch-invariant: a sequence's tiles begin with its own chunk, and nothing is split over programs.
    """
    rows = RowFormat.of(kv_blocks)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_blocks.shape[2:4]
    if head_dim != rows.head_dim or num_heads % num_kv_heads:
        raise ValueError(f"queries of {num_heads} heads of {head_dim} do not fit a cache of {tuple(kv_blocks.shape)}")
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device) if output is None else output
    if not len(batch.tiles):
        return output
    group = num_heads // num_kv_heads
    is_float32 = query.dtype is torch.float32
    is_wide = head_dim > 128 or rows.is_expanded or is_float32
    tile = _TILE_OF_WIDEST_ROWS if is_float32 and head_dim > 128 else _TILE_OF_WIDE_ROWS if is_wide else _TILE
    attend_rows[(len(batch.tiles), num_kv_heads)](
        query.contiguous(), rows.values, rows.scales, batch.block_tables, batch.tiles,
        query if alibi_slopes is None else alibi_slopes, output,
        batch.block_tables.stride(0), kv_blocks.stride(0), kv_blocks.stride(1), kv_blocks.stride(2),
        kv_blocks.stride(3), block_size, num_heads, scale, soft_cap or 0.0, window or 0,
        GROUP=group, ROWS=tile_rows(query.dtype, group), HEAD_DIM=head_dim, DIMS=triton.next_power_of_2(head_dim),
        TILE=tile, FORMAT=rows.name,
        HAS_SOFT_CAP=soft_cap is not None, HAS_WINDOW=window is not None, HAS_ALIBI=alibi_slopes is not None,
        PRODUCT=product_dtype(query.dtype), num_warps=8 if is_wide else 4,
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["table_stride"])  # changes from step to step: see attend_part
def attend_rows(
    query, values, scales, block_tables, tiles, alibi_slopes, output,
    table_stride, block_stride, value_stride, head_stride, row_stride, block_size, num_heads,
    scale, soft_cap, window,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr,
    FORMAT: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """The query heads of one KV head, for one tile of tokens. Sums are float32."""
    tile = tiles + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    seq = tl.load(tile).to(tl.int64)
    first_query = tl.load(tile + 1).to(tl.int64)
    num_queries = tl.load(tile + 2)
    first_position = tl.load(tile + 3)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = tokens < num_queries
    at = ((first_query + tokens) * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
    inside = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    own = tl.load(query + at, mask=inside, other=0.0).to(PRODUCT)
    slopes = tl.zeros([ROWS], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + heads, mask=is_row, other=0.0)
    # Rows beyond the tile's queries stand where the last one does: they widen neither end of what is read.
    query_positions = first_position + tl.minimum(tokens, num_queries - 1)
    end = first_position + num_queries
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, first_position - window + 1) // TILE * TILE
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(begin, end, TILE):
        highest, total, summed = attend_tile(
            own, query_positions, slopes, highest, total, summed, values, scales, block_tables + seq * table_stride,
            start, end, kv_head * head_stride, block_stride, value_stride, row_stride, block_size,
            scale, soft_cap, window, HEAD_DIM, DIMS, TILE, FORMAT, HAS_SOFT_CAP, HAS_WINDOW,
        )  # fmt: skip
    tl.store(output + at, (summed / total[:, None]).to(output.dtype.element_ty), mask=inside)
