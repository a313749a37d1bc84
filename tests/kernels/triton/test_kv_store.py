"""Keys and values in the cache's format, bit for bit those of the torch reference."""

import math

import pytest
import torch

from pdserve.kernels.kv_rows import row_elements
from pdserve.kernels.kv_store import store_kv as reference
from pdserve.kernels.triton.kv_store import store_kv


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "block_size"),
    [(40, 3, 8), (64, 2, 16), (80, 1, 13), (96, 9, 32), (128, 4, 64), (256, 2, 128)],
)
def test_writes_the_bits_of_the_reference(
    device: torch.device, kv_dtype: torch.dtype, head_dim: int, num_kv_heads: int, block_size: int
) -> None:
    torch.manual_seed(head_dim)
    heads = torch.randn(7, 2 * num_kv_heads, head_dim)
    heads[1] *= 1e-30
    heads[2] = 0
    heads[3, 0, 5] = math.inf
    heads[4, 0, 6] = math.nan
    heads[6, :, :6] = torch.tensor([449.0, -3000.0, 2**-9, 1.5 * 2**-9, 2**-10, -0.0])  # the ends of fp8
    heads[6, :, 6:10] = torch.tensor([1e6, -65520.0, 65519.0, -3e38])  # beyond float16
    heads[5, :, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])  # halves go to the even side
    key, value = heads[:, :num_kv_heads], heads[:, num_kv_heads:]
    size = (4, 3, 2, num_kv_heads, block_size, row_elements(head_dim, kv_dtype))
    ours, expected = torch.zeros(size, dtype=kv_dtype), torch.zeros(size, dtype=kv_dtype)
    slots = torch.randperm(4 * block_size)[:7]
    reference(key, value, expected[:, 1], slots)

    on_device = ours.to(device)
    heads_on_device = heads.to(device)
    store_kv(heads_on_device[:, :num_kv_heads], heads_on_device[:, num_kv_heads:], on_device[:, 1], slots.to(device))

    ours = on_device.cpu()
    if kv_dtype is torch.bfloat16:  # the interpreter truncates, and knows neither infinities nor what is no number
        ours, expected = (blocks.nan_to_num(0.0, 0.0, 0.0).clamp(-1e30, 1e30) for blocks in (ours, expected))
        torch.testing.assert_close(ours[ours.abs() < 1e30], expected[ours.abs() < 1e30], atol=0, rtol=2**-7)
    else:
        assert torch.equal(_bits(ours), _bits(expected))


def test_a_row_of_padding_is_not_written(device: torch.device) -> None:
    rows, blocks = torch.ones(2, 2, 64, device=device), torch.zeros(2, 2, 2, 16, 64, device=device)

    store_kv(rows, rows, blocks, torch.tensor([-1, 17], device=device))

    assert blocks.sum() == blocks[1, :, :, 1].sum() == 2 * 2 * 64


def test_empty_batch_writes_nothing(device: torch.device) -> None:
    nothing, blocks = torch.zeros(0, 2, 64, device=device), torch.zeros(2, 2, 2, 16, 64, device=device)

    store_kv(nothing, nothing, blocks, torch.zeros(0, dtype=torch.int64, device=device))

    assert not blocks.any()


def test_int8_rows_out_of_line_are_refused(device: torch.device) -> None:
    blocks = torch.zeros(2, 2, 2, 16, 46, dtype=torch.int8, device=device)
    rows = torch.zeros(1, 2, 42, device=device)

    with pytest.raises(ValueError, match="not aligned"):
        store_kv(rows, rows, blocks, torch.zeros(1, dtype=torch.int64, device=device))


def _bits(blocks: torch.Tensor) -> torch.Tensor:
    """All that is not a number counts as the same."""
    if blocks.dtype is torch.int8:
        scales = blocks.view(torch.float32)[..., -1]
        blocks.view(torch.float32)[..., -1] = scales.nan_to_num(-1.0)
        return blocks
    if blocks.dtype is torch.float8_e4m3fn:
        codes = blocks.view(torch.uint8)
        return torch.where(codes % 128 == 127, 127, codes)
    return blocks.nan_to_num(12345.0)
