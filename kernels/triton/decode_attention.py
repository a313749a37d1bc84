"""Paged attention of one query token a sequence: the context is split, a second pass merges the parts.

    out = sum_s e^(m_s - m) o_s / sum_s e^(m_s - m) l_s,  m = max_s m_s

over parts s, each with its own maximum m_s, total l_s and weighted sum of values o_s (flash decoding). The query heads
that share a KV head are rows of one matrix product.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-any-return,attr-defined"

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.decode_attention import DecodeBatch
from pdserve.kernels.triton.attention_tile import attend_tile
from pdserve.kernels.triton.rows import RowFormat, product_dtype

_TILE = 64
_TILE_OF_WIDE_ROWS = 32  # float32 products, and int8 rows while they are expanded, would spill registers
_TILE_OF_WIDEST_ROWS = 16  # float32 of head_dim > 128: with 32 more shared memory than a gfx942 has
_INVARIANT_SPLIT = 512  # tokens a part, whatever the batch
_SMALLEST_ROWS = 16  # of a matrix product
_WANTED_PROGRAMS = 512  # enough for two on each multiprocessor of a large GPU


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
    """Attend as kernels.decode_attention.decode_attention does.

    Batch-invariant: parts of a fixed size at absolute positions, so that a row's bits depend on its sequence alone.
    Otherwise the parts are as long as fill the GPU.
    """
    rows = RowFormat.of(kv_blocks)
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_blocks.shape[2:4]
    if head_dim != rows.head_dim or num_heads % num_kv_heads:
        raise ValueError(f"queries of {num_heads} heads of {head_dim} do not fit a cache of {tuple(kv_blocks.shape)}")
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_seqs == 0:
        return output
    query = query.contiguous()
    split = _INVARIANT_SPLIT if is_batch_invariant else _split_size(num_seqs * num_kv_heads, batch.max_context_len)
    longest = batch.max_context_len if window is None else min(batch.max_context_len, window + split)
    num_splits = max(1, triton.cdiv(longest, split))
    dims = triton.next_power_of_2(head_dim)
    parts = query.new_empty((num_seqs, num_heads, num_splits, dims), dtype=torch.float32)
    maxima, totals = (query.new_empty((num_seqs, num_heads, num_splits), dtype=torch.float32) for _ in range(2))
    group = num_heads // num_kv_heads
    attend_part[(num_seqs, num_kv_heads, num_splits)](
        query, rows.values, rows.scales, batch.block_tables, batch.context_lens,
        query if alibi_slopes is None else alibi_slopes, parts, maxima, totals,
        batch.block_tables.stride(0), kv_blocks.stride(0), kv_blocks.stride(1), kv_blocks.stride(2),
        kv_blocks.stride(3), block_size, num_heads, split, num_splits, scale, soft_cap or 0.0, window or 0,
        GROUP=group, ROWS=max(_SMALLEST_ROWS, triton.next_power_of_2(group)), HEAD_DIM=head_dim, DIMS=dims,
        TILE=_tile(query, rows), FORMAT=rows.name, HAS_SOFT_CAP=soft_cap is not None,
        HAS_WINDOW=window is not None, HAS_ALIBI=alibi_slopes is not None,
        PRODUCT=product_dtype(query.dtype), num_warps=4,
    )  # fmt: skip
    merge_parts[(num_seqs, num_heads)](
        parts, maxima, totals, batch.context_lens, output, num_heads, split, num_splits, window or 0,
        HEAD_DIM=head_dim, DIMS=dims, HAS_WINDOW=window is not None, num_warps=4,
    )  # fmt: skip
    return output


def _tile(query: Tensor, rows: RowFormat) -> int:
    if query.dtype is torch.float32 and query.shape[2] > 128:
        return _TILE_OF_WIDEST_ROWS
    return _TILE_OF_WIDE_ROWS if rows.is_expanded or query.dtype is torch.float32 else _TILE


def _split_size(num_rows: int, max_context_len: int) -> int:
    """Return tokens a part, a multiple of the tile: as many parts as give the GPU enough programs, of 256 at least."""
    num_splits = max(1, _WANTED_PROGRAMS // num_rows)
    return max(256, triton.cdiv(triton.cdiv(max_context_len, num_splits), _TILE) * _TILE)


# What changes from step to step is not specialised: a kernel compiled anew holds every stream up.
@triton.jit(do_not_specialize=["table_stride", "split", "num_splits"])
def attend_part(
    query, values, scales, block_tables, context_lens, alibi_slopes, parts, maxima, totals,
    table_stride, block_stride, value_stride, head_stride, row_stride, block_size, num_heads, split, num_splits,
    scale, soft_cap, window,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr,
    FORMAT: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """One part of one sequence's context, for the query heads of one KV head. Sums are float32."""
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    context_len = tl.load(context_lens + seq).to(tl.int32)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, context_len - window)
    split_start = (begin // split + part) * split
    split_end = tl.minimum(split_start + split, context_len)
    if split_start >= context_len:
        return
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    heads = kv_head * GROUP + rows
    is_row = rows < GROUP
    own = tl.load(
        query + (seq * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :],
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :], other=0.0,
    ).to(PRODUCT)  # fmt: skip
    slopes = tl.zeros([ROWS], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + heads, mask=is_row, other=0.0)
    query_positions = tl.zeros([ROWS], tl.int32) + (context_len - 1)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DIMS], tl.float32)
    first_tile = tl.maximum(split_start, begin // TILE * TILE)
    for start in range(first_tile, split_end, TILE):
        highest, total, summed = attend_tile(
            own, query_positions, slopes, highest, total, summed, values, scales, block_tables + seq * table_stride,
            start, split_end, kv_head * head_stride, block_stride, value_stride, row_stride, block_size,
            scale, soft_cap, window, HEAD_DIM, DIMS, TILE, FORMAT, HAS_SOFT_CAP, HAS_WINDOW,
        )  # fmt: skip
    at = (seq * num_heads + heads) * num_splits + part
    tl.store(parts + at[:, None] * DIMS + dims[None, :], summed, mask=is_row[:, None])
    tl.store(maxima + at, highest, mask=is_row)
    tl.store(totals + at, total, mask=is_row)


@triton.jit(do_not_specialize=["split", "num_splits"])
def merge_parts(
    parts, maxima, totals, context_lens, output, num_heads, split, num_splits, window,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Merge a head's parts in their order; parts beyond its own context are not read."""
    seq = tl.program_id(0).to(tl.int64)
    row = seq * num_heads + tl.program_id(1)
    context_len = tl.load(context_lens + seq).to(tl.int32)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, context_len - window)
    num_parts = tl.cdiv(context_len, split) - begin // split
    dims = tl.arange(0, DIMS)
    highest = float("-inf")
    total = 0.0
    summed = tl.zeros([DIMS], tl.float32)
    for part in range(num_parts):
        at = row * num_splits + part
        own_highest = tl.load(maxima + at)
        new_highest = tl.maximum(highest, own_highest)
        shrink = tl.exp(highest - new_highest)
        weight = tl.exp(own_highest - new_highest)
        total = total * shrink + tl.load(totals + at) * weight
        summed = summed * shrink + tl.load(parts + at * DIMS + dims) * weight
        highest = new_highest
    result = tl.where(total > 0, summed / tl.where(total > 0, total, 1.0), 0.0)
    tl.store(output + row * HEAD_DIM + dims, result.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
