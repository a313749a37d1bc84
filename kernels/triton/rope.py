"""(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) of halves, or pairs, in the first rotary_dim values of each head."""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-any-return,attr-defined"

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.rope import RopeLayout


def apply_rope(
    heads: Tensor,  # [num_tokens, num_heads, head_dim]
    cos: Tensor,  # [num_tokens, rotary_dim / 2]
    sin: Tensor,  # [num_tokens, rotary_dim / 2]
    layout: RopeLayout = RopeLayout.HALVES,
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """Rotate as kernels.rope.apply_rope does, in float32; `heads` may be a part of a wider tensor."""
    num_tokens, num_heads, head_dim = heads.shape
    half = cos.shape[-1]
    if heads.stride(2) != 1 or 2 * half > head_dim or cos.shape != sin.shape or len(cos) != num_tokens:
        raise ValueError(f"a rotation of {tuple(cos.shape)} does not fit heads of {tuple(heads.shape)}")
    output = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    if num_tokens:
        rotate_token[(num_tokens,)](
            heads, cos.contiguous(), sin.contiguous(), output, heads.stride(0), heads.stride(1), num_heads,
            HALF=half, IS_PAIRED=layout is RopeLayout.PAIRS, HEADS=triton.next_power_of_2(num_heads), HEAD_DIM=head_dim,
            DIMS=triton.next_power_of_2(head_dim), num_warps=4,
        )  # fmt: skip
    return output


@triton.jit
def rotate_token(
    heads, cos, sin, output, token_stride, head_stride, num_heads,
    HALF: tl.constexpr, IS_PAIRED: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """All heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, HEADS)
    dims = tl.arange(0, DIMS)
    inside = (rows < num_heads)[:, None] & (dims < HEAD_DIM)[None, :]
    is_rotated = dims < 2 * HALF
    if IS_PAIRED:
        is_first, index, other_dim = dims % 2 == 0, dims // 2, dims ^ 1
    else:
        is_first, index, other_dim = dims < HALF, dims % HALF, tl.where(dims < HALF, dims + HALF, dims - HALF)
    partner = tl.where(is_rotated, other_dim, dims)
    start = heads + token * token_stride + rows[:, None] * head_stride
    own = tl.load(start + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(start + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    angle = token * HALF + index
    cosine = tl.load(cos + angle, mask=is_rotated, other=1.0).to(tl.float32)
    sine = tl.load(sin + angle, mask=is_rotated, other=0.0).to(tl.float32)
    signed = tl.where(is_first, -sine, sine)
    rotated = own * cosine[None, :] + other * signed[None, :]
    at = (token * num_heads + rows)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(output + at, rotated.to(output.dtype.element_ty), mask=inside)
