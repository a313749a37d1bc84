"""New keys and values into their slots of the paged KV cache, quantized where the cache is of 8 bits."""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-any-return,attr-defined"

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.triton.rows import RowFormat, write


def store_kv(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    kv_blocks: Tensor,  # [num_blocks, 2, num_kv_heads, block_size, row_elements], one layer of the cache
    slot_mapping: Tensor,  # [num_tokens] int64: block_id * block_size + offset; negative: a padded row, not written
) -> None:
    """Write as kernels.kv_store.store_kv does, bit for bit."""
    rows = RowFormat.of(kv_blocks)
    num_tokens, num_kv_heads, head_dim = key.shape
    if key.stride(2) != 1 or value.stride(2) != 1 or head_dim != rows.head_dim or key.shape != value.shape:
        raise ValueError(f"keys {tuple(key.shape)} and values {tuple(value.shape)} do not fit the cache")
    if num_tokens == 0:
        return
    store_rows[(num_tokens, 2)](
        key, value, rows.values, rows.scales, slot_mapping, key.stride(0), key.stride(1), value.stride(0),
        value.stride(1), kv_blocks.stride(0), kv_blocks.stride(1), kv_blocks.stride(2), kv_blocks.stride(3),
        kv_blocks.shape[3], num_kv_heads, HEADS=triton.next_power_of_2(num_kv_heads), HEAD_DIM=head_dim,
        DIMS=triton.next_power_of_2(head_dim), FORMAT=rows.name, num_warps=4,
    )  # fmt: skip


@triton.jit
def store_rows(
    key, value, values, scales, slot_mapping, key_token_stride, key_head_stride, value_token_stride,
    value_head_stride, block_stride, part_stride, head_stride, row_stride, block_size, num_kv_heads,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """The keys (part 0) or the values (part 1) of one token."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, DIMS)
    is_head = heads < num_kv_heads
    inside = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    if part == 0:
        at = key + token * key_token_stride + heads[:, None] * key_head_stride + dims[None, :]
        rows = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    else:
        at = value + token * value_token_stride + heads[:, None] * value_head_stride + dims[None, :]
        rows = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slot_mapping + token)
    offset = slot // block_size * block_stride + part * part_stride + slot % block_size * row_stride
    write(values, scales, offset + heads * head_stride, dims, rows, is_head & (slot >= 0), HEAD_DIM, FORMAT)
