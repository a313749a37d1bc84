"""Norms, rotations and activations of rows against the torch reference."""

import math

import pytest
import torch

from pdserve.kernels.activation import Activation
from pdserve.kernels.activation import gated_activation as reference_activation
from pdserve.kernels.rms_norm import add_rms_norm as reference_add_rms_norm
from pdserve.kernels.rms_norm import rms_norm as reference_rms_norm
from pdserve.kernels.rope import RopeLayout
from pdserve.kernels.rope import apply_rope as reference_rope
from pdserve.kernels.triton.activation import gated_activation
from pdserve.kernels.triton.rms_norm import add_rms_norm, rms_norm
from pdserve.kernels.triton.rope import apply_rope

_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
_DTYPES = list(_TOLERANCE)


def _random(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator).to(dtype).to(device)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("size", [40, 576, 1000])
def test_rms_norm(device: torch.device, dtype: torch.dtype, size: int) -> None:
    rows = _random(2, 3, size, dtype=dtype, device=device)

    for weight_dtype in {dtype, torch.float32}:  # of float32: rounded after the weight, as for 1 + weight
        weight = _random(size, dtype=weight_dtype, device=device) + 1
        expected = reference_rms_norm(rows, weight, 1e-6)
        tolerance = _TOLERANCE[dtype]
        torch.testing.assert_close(rms_norm(rows, weight, 1e-6), expected, atol=tolerance, rtol=tolerance)


def test_rms_norm_of_heads_each_with_its_own_weight(device: torch.device) -> None:
    heads = _random(5, 4, 24, dtype=torch.float32, device=device)[:, :3]
    weight = _random(3, 24, dtype=torch.float32, device=device)

    torch.testing.assert_close(rms_norm(heads, weight, 1e-6), reference_rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_rms_norm_of_a_sum_returns_the_sum(device: torch.device, dtype: torch.dtype) -> None:
    hidden = _random(4, 80, dtype=dtype, device=device)
    delta = hidden.flip(0)

    for weight_dtype in {dtype, torch.float32}:
        weight = _random(80, dtype=weight_dtype, device=device)
        ours = add_rms_norm(hidden, delta, weight, 1e-5, 0.5)
        expected = reference_add_rms_norm(hidden, delta, weight, 1e-5, 0.5)
        torch.testing.assert_close(ours, expected, atol=_TOLERANCE[dtype], rtol=_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("layout", list(RopeLayout))
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (96, 96), (40, 20), (128, 128), (256, 64)])
def test_rope_turns_halves_or_pairs_and_leaves_the_rest(
    device: torch.device, dtype: torch.dtype, head_dim: int, rotary_dim: int, layout: RopeLayout
) -> None:
    heads = _random(5, 7, head_dim, dtype=dtype, device=device)[:, 1:6]
    angles = _random(5, rotary_dim // 2, dtype=torch.float32, device=device) * math.pi
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    ours = apply_rope(heads, cos, sin, layout)

    assert torch.equal(ours[..., rotary_dim:], heads[..., rotary_dim:])
    torch.testing.assert_close(ours, reference_rope(heads, cos, sin, layout), atol=2 * _TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("activation", list(Activation))
def test_gated_activation(device: torch.device, dtype: torch.dtype, activation: Activation) -> None:
    gate_up = _random(3, 2 * 1100, dtype=dtype, device=device) * 4
    gate_up[0, :4] = torch.tensor([-90.0, 90.0, 0.0, -1e-4])

    expected = reference_activation(gate_up, activation)
    tolerance = 2 * _TOLERANCE[dtype]
    torch.testing.assert_close(gated_activation(gate_up, activation), expected, atol=tolerance, rtol=tolerance)


def test_no_rows(device: torch.device) -> None:
    nothing, angles = torch.zeros(0, 64, device=device), torch.zeros(0, 32, device=device)

    assert rms_norm(nothing, torch.ones(64, device=device), 1e-6).shape == (0, 64)
    assert add_rms_norm(nothing, nothing, torch.ones(64, device=device), 1e-6)[1].shape == (0, 64)
    assert gated_activation(nothing, Activation.SILU).shape == (0, 32)
    assert apply_rope(nothing.view(0, 1, 64), angles, angles).shape == (0, 1, 64)


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    rows = torch.zeros(2, 64, device=device)

    with pytest.raises(ValueError, match="does not fit"):
        rms_norm(rows, torch.ones(63, device=device), 1e-6)
    with pytest.raises(ValueError, match="does not fit"):
        apply_rope(rows.view(2, 1, 64), torch.zeros(2, 33, device=device), torch.zeros(2, 33, device=device))
