"""y = weight * x / sqrt(mean(x^2) + eps), and the same of a sum that is kept as the next residual."""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-any-return,attr-defined"

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:  # [..., hidden_size]
    """Normalise as kernels.rms_norm.rms_norm does; a model's offset (1 + weight) is in its weight.

    A weight [num_heads, hidden_size] is for the rows of `hidden` [..., num_heads, hidden_size], each its own.
    """
    output = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    _launch(hidden, None, 1.0, weight, eps, output, output)
    return output


def add_rms_norm(
    hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:  # [..., hidden_size] each
    """Return rms_norm(s) and s = hidden + multiplier * delta, as kernels.rms_norm.add_rms_norm does."""
    output, total = (torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) for _ in range(2))
    _launch(hidden, delta, multiplier, weight, eps, output, total)
    return output, total


def _launch(
    hidden: Tensor, delta: Tensor | None, multiplier: float, weight: Tensor, eps: float, output: Tensor, total: Tensor
) -> None:
    size = hidden.shape[-1]
    is_fitting = weight.shape == hidden.shape[-weight.dim() :] and weight.dim() in (1, 2)
    if not is_fitting or (delta is not None and delta.shape != hidden.shape):
        raise ValueError(f"a weight of {tuple(weight.shape)} does not fit rows of {size}")
    num_rows = hidden.numel() // size
    if num_rows == 0:
        return
    norm_row[(num_rows,)](
        hidden.contiguous(), hidden if delta is None else delta.contiguous(), weight.contiguous(), output, total,
        multiplier, eps, weight.numel() // size, SIZE=size, WIDTH=triton.next_power_of_2(size),
        HAS_DELTA=delta is not None, IS_WIDE=weight.dtype is torch.float32, num_warps=4 if size <= 2048 else 8,
    )  # fmt: skip


@triton.jit
def norm_row(
    hidden, delta, weight, output, total, multiplier, eps, num_weights,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, HAS_DELTA: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """One row; the mean is float32. IS_WIDE: rounded after the weight, not before it."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, WIDTH)
    inside = dims < SIZE
    at = row * SIZE + dims
    x = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x = x + multiplier * tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    if not IS_WIDE:
        normed = normed.to(output.dtype.element_ty).to(tl.float32)
    y = tl.load(weight + row % num_weights * SIZE + dims, mask=inside, other=0.0).to(tl.float32) * normed
    tl.store(output + at, y.to(output.dtype.element_ty), mask=inside)
