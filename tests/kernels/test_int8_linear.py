"""8-bit weights: as near to the float weight as their levels allow, exact in between, the same bits in any company."""

import ctypes
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import pdserve.kernels.cpu as cpu
from pdserve.kernels.cpu import CpuKernels, runs_here
from pdserve.kernels.int8_linear import Int8Weight, int8_linear, quantize_rows
from pdserve.kernels.packed_weight import PackedInt8Weight

_SHAPES = [(1, 1), (16, 8), (17, 40), (199, 64), (250, 577), (1000, 33), (48, 1536)]
_NUM_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 32, 33, 150)


def _libraries() -> list[Path]:
    built = sorted(Path(cpu.__file__).parent.glob("cpu_*.so"))
    return [path for path in built if runs_here(ctypes.CDLL(str(path)))]


@pytest.fixture(params=_libraries(), ids=lambda path: path.name.split(".")[0])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(ctypes.CDLL(str(request.param)), 3, is_int8=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_reference_is_within_half_a_level_of_the_float_weight(shape: tuple[int, int]) -> None:
    weight, x = torch.randn(shape), torch.randn(5, shape[1])
    quantized = Int8Weight.of(weight)

    y = int8_linear(x, quantized, None)

    assert ((quantized.rows(torch.arange(shape[0])) - weight).abs() <= quantized.scales[:, None] * 0.5001).all()
    bound = 0.5001 * (x.abs() @ quantized.scales.expand(shape[1], -1))  # of the weights
    bound += (
        0.5001 * quantize_rows(x)[1][:, None] * quantized.rows(torch.arange(shape[0])).abs().sum(1)
    )  # of the inputs
    assert ((y - F.linear(x, weight)).abs() <= 1.0001 * bound + 1e-6).all()


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_compiled_linear_gives_the_bits_of_the_reference(
    kernels: CpuKernels, shape: tuple[int, int], has_bias: bool
) -> None:
    """Rounding and integers are exact, so that every build gives the same bits, for any number of rows."""
    num_outputs, num_inputs = shape
    weight, bias = torch.randn(shape), torch.randn(num_outputs) if has_bias else None
    weight[0] = 0.0
    packed, reference = kernels.pack(weight), Int8Weight.of(weight)
    for num_rows in _NUM_ROWS:
        x = torch.randn(num_rows, num_inputs + 3)[:, :num_inputs] * 10
        x[num_rows // 2, num_inputs // 2] = 3000.0  # a channel like those of real models
        x[num_rows // 3] = 0.0

        y = kernels.linear(x, packed, bias)

        assert torch.equal(y, int8_linear(x, reference, bias))
        assert torch.equal(torch.cat([kernels.linear(row[None], packed, bias) for row in x]), y)


def test_largest_values_everywhere_do_not_overflow(kernels: CpuKernels) -> None:
    for num_inputs in (64, 1536, 14336):
        weight, x = torch.full((3, num_inputs), -2.0), torch.full((2, num_inputs), 5.0)
        x[1] *= -1

        y = kernels.linear(x, kernels.pack(weight), None)

        expected = torch.tensor([[-10.0], [10.0]]) * num_inputs
        torch.testing.assert_close(y, expected.expand(2, 3), rtol=1e-5, atol=0)


@pytest.mark.parametrize("num_large", [1, 7, 8, 9, 16])
@pytest.mark.parametrize("num_inputs", [64, 1536, 14336])
def test_sums_fit_32_bits_however_many_channels_are_large(kernels: CpuKernels, num_inputs: int, num_large: int) -> None:
    x = torch.full((9, num_inputs), 1.0)
    for group in range(num_large):  # all of the channels that share a group, all of the same sign
        x[:, group::16] = 1000.0 * (1 + torch.arange(9.0))[:, None]
    weight = torch.full((20, num_inputs), 3.0)

    y = kernels.linear(x, kernels.pack(weight), None)

    assert 127 * quantize_rows(x)[0].long().abs().sum(1).max() < 2**31
    torch.testing.assert_close(y, 3.0 * x.sum(1, keepdim=True).expand(9, 20), rtol=4e-3, atol=0)


def test_large_channels_leave_the_others_their_levels() -> None:
    x = torch.randn(50, 576)
    x[:, [3, 100, 517]] *= 300

    values, scales = quantize_rows(x)

    assert values.abs().amax() > 127 * 20
    ordinary = torch.tensor([i for i in range(576) if i not in (3, 100, 517)])
    assert (values[:, ordinary].abs() > 127).float().mean() < 0.05
    assert ((values * scales[:, None] - x).abs().amax(1) <= 0.5001 * scales).all()
    assert scales.max() < 5 / 127


def test_what_is_not_a_number_does_not_become_one(kernels: CpuKernels) -> None:
    x = torch.randn(4, 40)
    x[1, 7], x[2, 0], x[3, 39] = torch.nan, torch.inf, -torch.inf

    y = kernels.linear(x, kernels.pack(torch.randn(20, 40)), None)

    assert y[0].isfinite().all()
    assert y[1:].isnan().all()
    assert quantize_rows(x)[1].isnan().tolist() == [False, True, True, True]


def test_rows_that_are_zero_or_tiny(kernels: CpuKernels) -> None:
    weight = torch.randn(20, 40)
    x = torch.stack([torch.zeros(40), torch.full((40,), 1e-30), torch.full((40,), 1e30)])

    y = kernels.linear(x, kernels.pack(weight), None)

    assert torch.equal(y, int8_linear(x, Int8Weight.of(weight), None))
    assert (y[0] == 0).all()


@pytest.mark.parametrize(("lanes", "inputs"), [(4, 2), (8, 2), (16, 2), (16, 4)])
@pytest.mark.parametrize("shape", [(199, 24), (4100, 7), (20000, 2)], ids=str)
def test_packed_weight_gives_its_rows_back(lanes: int, inputs: int, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    indexes = torch.tensor([0, shape[0] - 1, 7, 7, shape[0] // 2])

    assert torch.equal(PackedInt8Weight.of(weight, lanes, inputs).rows(indexes), Int8Weight.of(weight).rows(indexes))
