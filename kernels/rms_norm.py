"""Root-mean-square normalisation (Zhang and Sennrich 2019, equation 4)."""

import torch
from torch import Tensor


def rms_norm(
    hidden: Tensor,  # [..., hidden_size]
    weight: Tensor,  # [hidden_size], or broadcast over hidden; in hidden's dtype or float32
    eps: float,
) -> Tensor:  # [..., hidden_size]
    """y = weight * x / sqrt(mean(x^2) + eps), accumulated in float32.

    The weight's dtype says where the result is rounded: before the weight if that has hidden's dtype, after it if that
    is float32.
    """
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if hidden.dtype is torch.float32:  # what follows costs time even where there is nothing to round
        return weight * normed
    return (weight * normed.to(weight.dtype)).to(hidden.dtype)


def add_rms_norm(
    hidden: Tensor,  # [..., hidden_size]
    delta: Tensor,  # [..., hidden_size]
    weight: Tensor,
    eps: float,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:  # [..., hidden_size] each
    """Return rms_norm(s) and s = hidden + multiplier * delta, rounded to hidden's dtype."""
    total = torch.add(hidden, delta, alpha=multiplier)
    return rms_norm(total, weight, eps), total
