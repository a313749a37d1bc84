"""What kernels do with rows of the KV cache (kernels/kv_rows.py): find, expand and write them."""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-any-return,attr-defined"

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORD = 4  # bytes of a row's scale, and what int8 rows must be a multiple of


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How kernels address the rows of one layer's cache: its values, and its memory once more as words of a scale.

    fp8 goes to kernels as bytes, and is expanded and rounded with integers there: hardware before sm_89 has no such
    conversion, and that of gfx942 is for another e4m3.
    """

    values: Tensor  # [num_blocks, 2, num_kv_heads, block_size, row_elements]
    scales: Tensor  # the same memory as float32; `values` itself where rows have no scale
    head_dim: int
    name: str  # "float", "int8" or "fp8"

    @property
    def is_expanded(self) -> bool:
        """Whether a value is more than a conversion away from what products multiply."""
        return self.name != "float"

    @classmethod
    def of(cls, kv_blocks: Tensor) -> "RowFormat":
        """Raises ValueError if the cache is not laid out as kernels read it."""
        if kv_blocks.dim() != 5 or kv_blocks.shape[1] != 2 or kv_blocks.stride(4) != 1:
            raise ValueError(f"a layer's cache is [blocks, 2, heads, block_size, row], got {tuple(kv_blocks.shape)}")
        if kv_blocks.dtype is torch.float8_e4m3fn:
            values = kv_blocks.view(torch.uint8)
            return cls(values, values, kv_blocks.shape[4], "fp8")
        if kv_blocks.dtype is not torch.int8:
            return cls(kv_blocks, kv_blocks, kv_blocks.shape[4], "float")
        if any(size % _WORD for size in (*kv_blocks.stride()[:4], kv_blocks.storage_offset())):
            raise ValueError(f"int8 rows of {kv_blocks.shape[4]} bytes are not aligned to {_WORD}")
        return cls(kv_blocks, kv_blocks.view(torch.float32), kv_blocks.shape[4] - _WORD, "int8")


def product_dtype(dtype: torch.dtype) -> Any:
    """Return what products multiply: the queries' dtype, but float32 where the interpreter's numpy lacks bfloat16."""
    if dtype is torch.bfloat16:
        return tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
    return tl.float16 if dtype is torch.float16 else tl.float32


@triton.jit
def from_fp8(codes):
    """Bytes of e4m3 as float32: 4 bits of exponent above 7, 3 of mantissa, no infinity, nan where all are set."""
    bits = codes.to(tl.int32)
    magnitude = bits & 0x7F
    # The mantissa moves to float32's, and the exponent's bias from 7 to 127; below 2^-6 there is no leading one.
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return (value.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def to_fp8(values):
    """Float32 rounded to bytes of e4m3: to nearest, ties to even, at most 448; what is not finite is nan."""
    magnitude = tl.abs(values)
    is_finite = magnitude < float("inf")
    clamped = tl.minimum(tl.where(is_finite, magnitude, 0.0), 448.0)
    # 1.5 * 2^23 is where a float's last bit is 1: adding it rounds to the nearest integer, ties to even.
    small = ((clamped * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    bits = clamped.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    code = tl.where(clamped < 0.015625, small, normal)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(is_finite, code | sign, 0x7F).to(tl.uint8)


@triton.jit
def expand(values, scales, offsets, dims, mask, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Rows at `offsets` [n] as float32 [n, d]; zeros outside `mask` [n] and beyond HEAD_DIM."""
    inside = mask[:, None] & (dims < HEAD_DIM)[None, :]
    stored = tl.load(values + offsets[:, None] + dims[None, :], mask=inside, other=0)
    if FORMAT == "fp8":
        return from_fp8(stored)
    loaded = stored.to(tl.float32)
    if FORMAT == "int8":
        loaded = loaded * tl.load(scales + (offsets + HEAD_DIM) // 4, mask=mask, other=0.0)[:, None]
    return loaded


@triton.jit
def write(values, scales, offsets, dims, rows, mask, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Round float32 `rows` [n, d] to the cache's format and write them at `offsets` [n] where `mask` [n]."""
    inside = mask[:, None] & (dims < HEAD_DIM)[None, :]
    if FORMAT == "int8":
        magnitudes = tl.where(inside, tl.abs(rows), 0.0)
        is_finite = tl.min((magnitudes < float("inf")).to(tl.int32), 1) == 1  # a nan compares as false
        scale = tl.where(is_finite, tl.div_rn(tl.max(magnitudes, 1), 127.0), float("nan"))
        has_scale = (scale > 0)[:, None] & inside
        quotients = tl.div_rn(tl.where(has_scale, rows, 0.0), tl.where(has_scale, scale[:, None], 1.0))
        # 1.5 * 2^23 is where a float's last bit is 1: adding it rounds to the nearest integer, ties to even.
        rounded = (quotients + 12582912.0) - 12582912.0
        clamped = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
        tl.store(values + offsets[:, None] + dims[None, :], clamped.to(tl.int8), mask=inside)
        tl.store(scales + (offsets + HEAD_DIM) // 4, scale, mask=mask)
    elif FORMAT == "fp8":
        tl.store(values + offsets[:, None] + dims[None, :], to_fp8(rows), mask=inside)
    else:
        if values.dtype.element_ty == tl.float16:  # what is finite stays so
            kept = tl.minimum(tl.maximum(rows, -65504.0), 65504.0)
            rows = tl.where(tl.abs(rows) < float("inf"), kept, rows)
        tl.store(values + offsets[:, None] + dims[None, :], rows.to(values.dtype.element_ty), mask=inside)
