"""Weights as the compiled CPU kernels read them: the lanes of a vector run over outputs."""

import torch
from torch import Tensor

from pdserve.kernels.int8_linear import Int8Weight

_PANELS_AT_ONCE = 1024
_UNSIGNED_INPUTS, _OFFSET = 4, 128


class PackedWeight:
    """A weight as [ceil(out / lanes), in, lanes] float32."""

    __slots__ = ("out_features", "panels")

    def __init__(self, panels: Tensor, out_features: int) -> None:
        self.panels = panels
        self.out_features = out_features

    @property
    def in_features(self) -> int:
        """Values of a row that it multiplies."""
        return self.panels.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of its values."""
        return self.panels.dtype

    @classmethod
    def of(cls, weight: Tensor, lanes: int) -> "PackedWeight":
        """Pack a weight [out_features, in_features]."""
        out_features, in_features = weight.shape
        panels = torch.zeros(-(-out_features // lanes), in_features, lanes)
        whole = out_features // lanes
        panels[:whole] = weight[: whole * lanes].view(whole, lanes, in_features).transpose(1, 2)
        if rest := out_features - whole * lanes:
            panels[whole, :, :rest] = weight[whole * lanes :].T
        return cls(panels, out_features)

    def rows(self, indexes: Tensor) -> Tensor:  # [num_rows] int64 -> [num_rows, in_features]
        """Return rows of the original weight: an embedding that is tied to the output head is stored once."""
        lanes = self.panels.shape[2]
        return self.panels[indexes // lanes, :, indexes % lanes]


class PackedInt8Weight:
    """A weight of 8-bit integers as [ceil(out / lanes), ceil(in / inputs), lanes, inputs], and one scale an output.

    `inputs` of an output lie side by side: two, or four where the processor multiplies numbers without a sign by
    numbers with one. Then weights are stored as w + 128.
    """

    __slots__ = ("in_features", "out_features", "panels", "scales")

    def __init__(self, panels: Tensor, scales: Tensor, out_features: int, in_features: int) -> None:
        self.panels = panels  # int8, or uint8 with 128 added
        self.scales = scales  # [lanes * number of panels] float32
        self.out_features = out_features
        self.in_features = in_features

    @property
    def dtype(self) -> torch.dtype:
        """Of what it computes."""
        return self.scales.dtype

    @classmethod
    def of(cls, weight: Tensor, lanes: int, inputs: int) -> "PackedInt8Weight":
        """Quantize and pack a weight [out_features, in_features], some panels at a time."""
        out_features, in_features = weight.shape
        num_panels, num_steps = -(-out_features // lanes), -(-in_features // inputs)
        dtype = torch.uint8 if inputs == _UNSIGNED_INPUTS else torch.int8
        panels = torch.zeros(num_panels, num_steps, lanes, inputs, dtype=dtype)
        scales = torch.zeros(num_panels * lanes)
        for start in range(0, num_panels, _PANELS_AT_ONCE):
            part = Int8Weight.of(weight[start * lanes : (start + _PANELS_AT_ONCE) * lanes])
            count = min(_PANELS_AT_ONCE, num_panels - start)
            padded = torch.zeros(count * lanes, inputs * num_steps, dtype=dtype)
            padded[: part.values.shape[0], :in_features] = _stored(part.values, dtype)
            panels[start : start + count] = padded.view(count, lanes, num_steps, inputs).transpose(1, 2)
            scales[start * lanes : start * lanes + part.scales.shape[0]] = part.scales
        return cls(panels, scales, out_features, in_features)

    def rows(self, indexes: Tensor) -> Tensor:  # [num_rows] int64 -> [num_rows, in_features] float32
        """Return rows of the weight as it computes."""
        lanes = self.panels.shape[2]
        values = self.panels[indexes // lanes, :, indexes % lanes].flatten(1)[:, : self.in_features]
        offset = _OFFSET if values.dtype is torch.uint8 else 0
        return (values.float() - offset) * self.scales[indexes, None]


def _stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values if dtype is torch.int8 else (values.to(torch.int16) + _OFFSET).to(torch.uint8)
