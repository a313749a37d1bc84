"""Rotary position embedding applied to queries and keys (Su et al. 2021, RoFormer, section 3.2.2)."""

from enum import StrEnum

import torch
from torch import Tensor


class RopeLayout(StrEnum):
    """Which two values of a head are turned together."""

    HALVES = "halves"  # i and i + rotary_dim / 2: that of every model of our own decoder
    PAIRS = "pairs"  # 2 i and 2 i + 1: GPT-J, GLM, Cohere


def apply_rope(
    heads: Tensor,  # [num_tokens, num_heads, head_dim]
    cos: Tensor,  # [num_tokens, rotary_dim / 2]
    sin: Tensor,  # [num_tokens, rotary_dim / 2]
    layout: RopeLayout = RopeLayout.HALVES,
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """Rotate (x1, x2) among the first rotary_dim values: (x1 cos - x2 sin, x2 cos + x1 sin)."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if layout is RopeLayout.PAIRS:
        first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
        rotated = [torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)]
    else:
        first, second = heads[..., :half], heads[..., half : 2 * half]
        rotated = [first * cos - second * sin, second * cos + first * sin]
    if heads.shape[-1] > 2 * half:
        rotated.append(heads[..., 2 * half :])
    return torch.cat(rotated, dim=-1)
