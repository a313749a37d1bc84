"""The rows of a KV cache: one head of one token, in the cache's format.

Floating-point rows are head_dim elements. What is finite and beyond the largest of float16, 65,504, becomes that, not
an infinity that would make whole rows of attention nothing; fp8 is e4m3 (Micikevicius et al. 2022), in which what is
larger than 448 becomes 448. An int8 row is head_dim values and, in its last 4 bytes, their scale as
float32: x = value * scale with scale = max |x| / 127, so |error| <= scale / 2. The scale lies with its values, so that
whatever moves a row, be it a block, a head or a token, moves its scale.
"""

import torch
from torch import Tensor

_SCALE_SIZE_BYTES = 4
_LARGEST = 127.0
_LARGEST_FP8 = 448.0  # of e4m3, which has no infinity
_LARGEST_FLOAT16 = 65504.0


def kv_torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a cache by its name in the settings."""
    dtype: torch.dtype = torch.float8_e4m3fn if name == "fp8" else getattr(torch, name)
    return dtype


def row_elements(head_dim: int, dtype: torch.dtype) -> int:
    """Return how many elements of the cache's dtype a row has."""
    return head_dim + _SCALE_SIZE_BYTES if dtype is torch.int8 else head_dim


def pack_rows(values: Tensor, dtype: torch.dtype) -> Tensor:  # [..., head_dim] -> [..., row_elements]
    """Round rows to the cache's format. A row with a value that is not finite expands to what is not a number."""
    if dtype is torch.float8_e4m3fn:
        values = values.float()
        return torch.where(values.isfinite(), values.clamp(-_LARGEST_FP8, _LARGEST_FP8), torch.nan).to(dtype)
    if dtype is torch.float16 and values.dtype is not dtype:
        return torch.where(values.isfinite(), values.clamp(-_LARGEST_FLOAT16, _LARGEST_FLOAT16), values).to(dtype)
    if dtype is not torch.int8:
        return values.to(dtype)
    values = values.float()
    largest = values.abs().amax(-1, keepdim=True)
    scale = torch.where(values.isfinite().all(-1, keepdim=True), largest / _LARGEST, torch.nan)
    # The scale of the smallest values is 0: they count as zeros.
    rounded = torch.where(scale > 0, (values / scale).round().clamp(-_LARGEST, _LARGEST), 0.0)
    return torch.cat((rounded.to(torch.int8), scale.contiguous().view(torch.int8)), dim=-1)


def expand_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:  # [..., row_elements] -> [..., head_dim] of `dtype`
    """Return the values of rows."""
    if rows.dtype is not torch.int8:
        return rows.to(dtype)
    scale = rows[..., -_SCALE_SIZE_BYTES:].contiguous().view(torch.float32)
    return (rows[..., :-_SCALE_SIZE_BYTES].float() * scale).to(dtype)
