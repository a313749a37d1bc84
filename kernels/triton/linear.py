"""y = x W^T (* scales) + b with weights of the rows' dtype, or of 8 bits and one scale an output.

The sum over inputs is float32, in tiles of a fixed size and order: it is never split over programs.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-any-return,attr-defined"

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.int8_linear import Int8Weight
from pdserve.kernels.triton.rows import product_dtype

_OUTPUTS, _INPUTS = 64, 64
_FEW_ROWS, _ROWS = 16, 64


def linear(
    rows: Tensor,  # [num_rows, in_features]
    weight: Tensor | Int8Weight,  # [out_features, in_features]
    bias: Tensor | None,  # [out_features]
    *,
    is_batch_invariant: bool = False,
) -> Tensor:  # [num_rows, out_features]
    """Compute as kernels.linear.linear does. Batch-invariant: one shape of tile for any batch."""
    values = weight.values if isinstance(weight, Int8Weight) else weight
    num_rows, num_inputs = rows.shape
    num_outputs = len(values)
    if values.shape[1] != num_inputs:
        raise ValueError(f"a weight of {tuple(values.shape)} does not fit rows of {num_inputs}")
    output = rows.new_empty((num_rows, num_outputs))
    if num_rows == 0:
        return output
    tile = _ROWS if is_batch_invariant or num_rows > _FEW_ROWS else _FEW_ROWS
    multiply[(triton.cdiv(num_rows, tile), triton.cdiv(num_outputs, _OUTPUTS))](
        rows.contiguous(), values.contiguous(), weight.scales if isinstance(weight, Int8Weight) else rows,
        rows if bias is None else bias, output, num_rows, num_outputs, num_inputs,
        ROWS=tile, OUTPUTS=_OUTPUTS, INPUTS=_INPUTS, HAS_SCALES=isinstance(weight, Int8Weight),
        HAS_BIAS=bias is not None, PRODUCT=product_dtype(rows.dtype), num_warps=4,
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["num_rows"])  # changes from step to step: see attend_part
def multiply(
    rows, weight, scales, bias, output, num_rows, num_outputs, num_inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """A tile of the result."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_column = row < num_rows, column < num_outputs
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, num_inputs, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        is_input = (inputs < num_inputs)[None, :]
        row_at, weight_at = row[:, None] * num_inputs + inputs[None, :], column[:, None] * num_inputs + inputs[None, :]
        x = tl.load(rows + row_at, mask=is_row[:, None] & is_input, other=0)
        w = tl.load(weight + weight_at, mask=is_column[:, None] & is_input, other=0)
        sums = tl.dot(x.to(PRODUCT), tl.trans(w.to(PRODUCT)), sums, input_precision="ieee")
    if HAS_SCALES:
        sums = sums * tl.load(scales + column, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        sums = sums + tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = output + row[:, None] * num_outputs + column[None, :]
    tl.store(at, sums.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
