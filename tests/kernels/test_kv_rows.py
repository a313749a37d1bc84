"""Rows of the KV cache: how far a value may be off, in each format, and what becomes of extremes."""

import math

import pytest
import torch

from pdserve.kernels.kv_rows import expand_rows, pack_rows, row_elements


@pytest.mark.parametrize("head_dim", [1, 3, 40, 64, 80, 96, 128, 256])
def test_int8_is_off_by_at_most_half_a_scale(head_dim: int) -> None:
    torch.manual_seed(head_dim)
    values = torch.randn(50, head_dim) * torch.logspace(-20, 20, 50)[:, None]

    rows = pack_rows(values, torch.int8)
    expanded = expand_rows(rows, torch.float32)

    assert rows.shape == (50, row_elements(head_dim, torch.int8))
    scales = rows[:, head_dim:].contiguous().view(torch.float32)
    assert torch.equal(scales, values.abs().amax(1, keepdim=True) / 127)
    assert ((expanded - values).abs() <= scales / 2 * (1 + 1e-5)).all()


def test_rounding_again_changes_nothing() -> None:
    torch.manual_seed(0)
    once = expand_rows(pack_rows(torch.randn(200, 64), torch.int8), torch.float32)

    again = expand_rows(pack_rows(once, torch.int8), torch.float32)

    torch.testing.assert_close(again, once, atol=0, rtol=1e-6)


def test_zeros_and_values_too_small_for_a_scale_are_zeros() -> None:
    values = torch.tensor([[0.0, 0.0], [1e-45, -1e-45]])

    assert torch.equal(expand_rows(pack_rows(values, torch.int8), torch.float32), torch.zeros(2, 2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_not_hidden(bad: float) -> None:
    values = torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 3.0]])

    expanded = expand_rows(pack_rows(values, torch.int8), torch.float32)

    assert expanded[0].isnan().all()
    assert expanded[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_what_is_finite_stays_so(dtype: torch.dtype) -> None:
    values = torch.tensor([[65504.0, 65520.0, -1e6, 3e38]])

    expanded = expand_rows(pack_rows(values, dtype), torch.float32)

    assert expanded.isfinite().all()
    if dtype is torch.float16:
        assert expanded.tolist() == [[65504.0, 65504.0, -65504.0, 65504.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_floating_point_rows_are_the_values_rounded(dtype: torch.dtype) -> None:
    values = torch.randn(5, 40)

    assert row_elements(40, dtype) == 40
    assert torch.equal(expand_rows(pack_rows(values, dtype), torch.float32), values.to(dtype).float())
