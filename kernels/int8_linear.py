"""Linear layers over 8-bit weights, exact in integers: y = (q_x q_W^T) scale_x scale_W + b.

A weight has one scale an output, a row of inputs one scale, so a row's result never depends on the other rows. A few
channels of a transformer are far larger than the rest: the scale is made for the others, whose integers fit 8 bits, and
the few get up to 16 (measured: docs/performance_kernels.md).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_WEIGHT_LEVELS = 127
_MAX_LEVELS = 127 * 257  # two parts of 8 bits: 256 high + low
_MAX_SUM = 2**31
_GROUPS, _TYPICAL_GROUP = 16, 8
_TYPICAL_LEVEL = 1.2 / 127
_SMALLEST = 2.0**-100  # below, the inverse of a scale may not be finite: as good as 0
_ROWS_AT_ONCE = 4096  # of a weight that is quantized: the copies stay small beside the model


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight as integers: weight = values * scales[:, None]."""

    values: Tensor  # [out_features, in_features] int8
    scales: Tensor  # [out_features] float32

    @property
    def dtype(self) -> torch.dtype:
        """Of what it computes."""
        return self.scales.dtype

    @classmethod
    def of(cls, weight: Tensor) -> "Int8Weight":
        """Quantize a weight [out_features, in_features]: scale = max |w| / 127 of each output."""
        values = torch.empty(weight.shape, dtype=torch.int8)
        scales = torch.empty(weight.shape[0])
        for start in range(0, weight.shape[0], _ROWS_AT_ONCE):
            part = weight[start : start + _ROWS_AT_ONCE].float()
            scale = part.abs().amax(1) / _WEIGHT_LEVELS
            scales[start : start + _ROWS_AT_ONCE] = scale
            divisor = torch.where(scale > 0, scale, 1.0)[:, None]
            values[start : start + _ROWS_AT_ONCE] = (part / divisor).round_().to(torch.int8)
        return cls(values, scales)

    def rows(self, indexes: Tensor) -> Tensor:  # [num_rows] int64 -> [num_rows, in_features]
        """Return rows of the weight as it computes."""
        return self.values[indexes] * self.scales[indexes, None]


def row_scales(rows: Tensor) -> Tensor:  # [num_rows, in_features] float32 -> [num_rows, 1]
    """Return what a level of each row is worth; not finite: nan.

    Channels are dealt to 16 groups by their number. Where few channels are large, few groups are, and the ninth of
    their maxima in order is typical: 1.2 times that is 127 levels. No integer may exceed its two parts, nor
    a sum of products 32 bits.
    """
    size = rows.shape[1]
    padded = F.pad(rows.abs(), (0, -size % _GROUPS)).view(rows.shape[0], -(-size // _GROUPS), _GROUPS)
    maxima = padded.amax(1) if rows.shape[0] else padded[:, 0]
    largest, total = maxima.amax(1, keepdim=True), torch.zeros(rows.shape[0], 1)
    for group in range(_GROUPS):  # in this order: the compiled kernels give the same bits
        total = total + maxima[:, group : group + 1]
    typical = maxima.sort(1).values[:, _TYPICAL_GROUP : _TYPICAL_GROUP + 1]
    fine = torch.minimum(typical * _constant(_TYPICAL_LEVEL), largest * _constant(1 / _WEIGHT_LEVELS))
    fit_sum = total * _constant(_WEIGHT_LEVELS * 1.01 / _MAX_SUM * -(-size // _GROUPS))
    scales = torch.maximum(torch.maximum(fine, largest * _constant(1 / _MAX_LEVELS)), fit_sum)
    return torch.where(largest.isfinite(), torch.where(largest > _SMALLEST, scales, 0.0), torch.nan)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:  # int32 of rows' shape, scales [num_rows] float32
    """q = round(x / scale), for each row [in_features]. Not finite: the scale is nan, the integers are 0."""
    scales = row_scales(rows)
    inverse = torch.where(scales > 0, torch.ones_like(scales) / scales, 0.0)
    return (rows * inverse).nan_to_num(0.0).round().to(torch.int32), scales[:, 0]


def _constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)  # a Python number would not be rounded to float32 first


def int8_linear(
    rows: Tensor,  # [num_rows, in_features] float32
    weight: Int8Weight,
    bias: Tensor | None,  # [out_features] float32
) -> Tensor:  # [num_rows, out_features] float32
    """y = x W^T + b. The sums are exact: float64 holds any 32-bit integer."""
    values, scales = quantize_rows(rows)
    sums = torch.matmul(values.double(), weight.values.double().T).float()
    y = sums * scales[:, None] * weight.scales
    return y if bias is None else y + bias
