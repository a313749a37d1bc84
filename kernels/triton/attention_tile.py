"""One tile of keys and values in a running softmax (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1).

Sums are float32. A tile that a row does not see leaves the row's bits as they are: it adds exact zeros and scales by
exactly one. Tiles lie at absolute positions, so that a row meets the same tiles whatever it is computed with.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-any-return,attr-defined"

import triton
import triton.language as tl

from pdserve.kernels.triton.rows import expand


@triton.jit
def attend_tile(
    query,  # [m, d] in the dtype of the products
    query_positions,  # [m] absolute
    slopes,  # [m] float32, ALiBi; zeros without
    highest,  # [m] running maximum, total and weighted sum of values
    total,
    summed,  # [m, d]
    values,  # the cache's rows, as RowFormat gives them
    scales,
    table,  # the sequence's block ids
    start,  # of the tile, absolute
    end,  # positions from here on are not read
    head_offset,  # of the KV head within a block
    block_stride,
    value_stride,  # from keys to values
    row_stride,
    block_size,
    scale,
    soft_cap,
    window,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    dims = tl.arange(0, DIMS)
    positions = start + tl.arange(0, TILE)
    # A block before all windows may be that of another sequence by now: its id is not even read.
    is_read = positions < end
    if HAS_WINDOW:
        is_read = is_read & (positions > tl.min(query_positions, 0) - window)
    block_ids = tl.load(table + positions // block_size, mask=is_read, other=0).to(tl.int64)
    offsets = block_ids * block_stride + head_offset + (positions % block_size) * row_stride
    keys = expand(values, scales, offsets, dims, is_read, HEAD_DIM, FORMAT).to(query.dtype)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if HAS_SOFT_CAP:
        # tanh(x) = 1 - 2 / (e^2x + 1), from the side where e^2x cannot overflow
        ratio = tl.abs(scores) / soft_cap
        folded = tl.exp(-2.0 * ratio)
        capped = soft_cap * (1.0 - folded) / (1.0 + folded)
        scores = tl.where(scores < 0, -capped, capped)
    distances = query_positions[:, None] - positions[None, :]
    scores = scores - slopes[:, None] * distances.to(tl.float32)
    is_seen = (distances >= 0) & is_read[None, :]
    if HAS_WINDOW:
        is_seen = is_seen & (distances < window)
    scores = tl.where(is_seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    anchor = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp(scores - anchor[:, None])
    shrink = tl.exp(highest - anchor)
    rows = expand(values, scales, offsets + value_stride, dims, is_read, HEAD_DIM, FORMAT).to(query.dtype)
    products = tl.dot(weights.to(query.dtype), rows, input_precision="ieee")
    return new_highest, total * shrink + tl.sum(weights, 1), summed * shrink[:, None] + products
