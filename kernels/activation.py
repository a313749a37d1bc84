"""Gated activations of a feed-forward block (Shazeer 2020, GLU variants, equations 5 and 6)."""

from enum import StrEnum

import torch.nn.functional as F
from torch import Tensor


class Activation(StrEnum):
    """What the gate goes through."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:  # [..., 2 * size] -> [..., size]
    """activation(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    match activation:
        case Activation.SILU:
            return F.silu(gate) * up
        case Activation.GELU:
            return F.gelu(gate) * up
        case Activation.GELU_TANH:
            return F.gelu(gate, approximate="tanh") * up
