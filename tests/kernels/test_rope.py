"""Rotation against complex multiplication; the rest of a partly rotated head is left alone."""

import pytest
import torch

from pdserve.kernels.rope import RopeLayout, apply_rope


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(40, 40), (64, 64), (80, 20), (96, 72), (256, 256), (2, 2)])
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(0, 2), (1, 1), (33, 9)])
def test_pairs_turn_by_their_angles(head_dim: int, rotary_dim: int, num_tokens: int, num_heads: int) -> None:
    heads = torch.randn(num_tokens, num_heads, head_dim)
    angles = torch.rand(num_tokens, rotary_dim // 2) * 100
    half = rotary_dim // 2
    pairs = torch.complex(heads[..., :half], heads[..., half:rotary_dim])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]

    rotated = apply_rope(heads, angles.cos(), angles.sin())

    torch.testing.assert_close(rotated[..., :half], turned.real, atol=1e-5, rtol=0)
    torch.testing.assert_close(rotated[..., half:rotary_dim], turned.imag, atol=1e-5, rtol=0)
    assert torch.equal(rotated[..., rotary_dim:], heads[..., rotary_dim:])


def test_neighbours_turn_as_halves_do_when_sorted() -> None:
    heads, angles = torch.randn(5, 3, 40), torch.rand(5, 10)
    order = torch.cat((torch.arange(0, 20, 2), torch.arange(1, 20, 2), torch.arange(20, 40)))

    rotated = apply_rope(heads, angles.cos(), angles.sin(), RopeLayout.PAIRS)

    assert torch.equal(rotated[..., order], apply_rope(heads[..., order], angles.cos(), angles.sin()))


def test_scores_depend_on_the_distance_only() -> None:
    query, key = torch.randn(2, 1, 1, 64)
    frequencies = 1.0 / 10000 ** (torch.arange(0, 64, 2) / 64)

    def score(query_position: int, key_position: int) -> float:
        angles = [torch.tensor([[float(position)]]) * frequencies for position in (query_position, key_position)]
        turned = [apply_rope(x, each.cos(), each.sin()) for x, each in zip((query, key), angles, strict=True)]
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)
