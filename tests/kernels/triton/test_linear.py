"""Matrix products with weights of 8 bits against the torch reference."""

import pytest
import torch

from pdserve.kernels.int8_linear import Int8Weight
from pdserve.kernels.linear import linear as reference
from pdserve.kernels.triton.linear import linear

_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def _weight(num_outputs: int, num_inputs: int, device: torch.device) -> Int8Weight:
    generator = torch.Generator().manual_seed(num_outputs)
    weight = Int8Weight.of(torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5)
    return Int8Weight(weight.values.to(device), weight.scales.to(device))


@pytest.mark.parametrize("dtype", list(_TOLERANCE))
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), [(1, 65, 40), (17, 128, 100), (70, 30, 192)])
def test_equals_the_reference(
    device: torch.device, dtype: torch.dtype, num_rows: int, num_outputs: int, num_inputs: int
) -> None:
    torch.manual_seed(0)
    weight = _weight(num_outputs, num_inputs, device)
    rows, bias = torch.randn(num_rows, num_inputs).to(dtype).to(device), torch.randn(num_outputs).to(dtype).to(device)
    dense = (weight.values * weight.scales[:, None]).to(dtype)

    for each in (weight, dense):
        expected = reference(rows, each, bias)
        tolerance = _TOLERANCE[dtype]
        torch.testing.assert_close(linear(rows, each, bias), expected, atol=tolerance, rtol=tolerance)


def test_batch_invariant_a_row_has_the_same_bits_alone(device: torch.device) -> None:
    torch.manual_seed(1)
    weight, rows = _weight(70, 150, device), torch.randn(80, 150, device=device)

    together = linear(rows, weight, None, is_batch_invariant=True)

    for row in (0, 3, 63):
        assert torch.equal(linear(rows[: row + 1], weight, None, is_batch_invariant=True)[row], together[row])


def test_no_rows_and_rows_that_do_not_fit(device: torch.device) -> None:
    weight = _weight(8, 40, device)

    assert linear(torch.zeros(0, 40, device=device), weight, None).shape == (0, 8)
    with pytest.raises(ValueError, match="does not fit"):
        linear(torch.zeros(1, 41, device=device), weight, None)
