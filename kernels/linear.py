"""Linear layers with inputs as they are, for processors that multiply floats as fast as integers: the reference."""

import torch
from torch import Tensor

from pdserve.kernels.int8_linear import Int8Weight


def linear(
    rows: Tensor,  # [num_rows, in_features]
    weight: Tensor | Int8Weight,  # [out_features, in_features]
    bias: Tensor | None,  # [out_features]
    *,
    is_batch_invariant: bool = False,
) -> Tensor:  # [num_rows, out_features] of rows' dtype
    """y = x W^T + b, summed in float32.

    Batch-invariant: a row at a time.
    """
    values = weight.values if isinstance(weight, Int8Weight) else weight
    parts = torch.split(rows.float(), 1) if is_batch_invariant else (rows.float(),)
    y = torch.cat([torch.matmul(part, values.float().T) for part in parts])
    if isinstance(weight, Int8Weight):
        y = y * weight.scales
    return (y if bias is None else y + bias.float()).to(rows.dtype)
