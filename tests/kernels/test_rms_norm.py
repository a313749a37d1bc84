"""RMSNorm against its formula, and where it rounds in 16 bits."""

import pytest
import torch

from pdserve.kernels.rms_norm import rms_norm


@pytest.mark.parametrize("width", [1, 40, 577, 4096])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_equals_the_formula(width: int, num_tokens: int) -> None:
    hidden, weight = torch.randn(num_tokens, width) * 3, torch.randn(width)
    wide = hidden.double()
    expected = weight.double() * wide / (wide.pow(2).sum(-1, keepdim=True) / width + 1e-5).sqrt()

    torch.testing.assert_close(rms_norm(hidden, weight, 1e-5).double(), expected, atol=1e-5, rtol=1e-5)


def test_heads_have_their_own_weights() -> None:
    heads, weight = torch.randn(5, 3, 16), torch.randn(3, 16)

    normed = rms_norm(heads, weight, 1e-6)

    for head in range(3):
        assert torch.equal(normed[:, head], rms_norm(heads[:, head], weight[head], 1e-6))


def test_large_values_do_not_overflow_in_float16() -> None:
    hidden = torch.full((1, 64), 3e4, dtype=torch.float16)

    assert torch.equal(rms_norm(hidden, torch.ones(64, dtype=torch.float16), 1e-6), torch.ones_like(hidden))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_of_the_weight_says_where_the_result_is_rounded(dtype: torch.dtype) -> None:
    hidden = torch.randn(50, 64).to(dtype)
    weight = torch.randn(64).to(dtype)
    wide = hidden.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)

    before, after = rms_norm(hidden, weight, 1e-6), rms_norm(hidden, weight.float(), 1e-6)

    assert before.dtype == after.dtype == dtype
    assert torch.equal(before, weight * unit.to(dtype))
    assert torch.equal(after, (weight.float() * unit).to(dtype))
    assert not torch.equal(before, after)
