"""Whole blocks against the torch reference, in each pair of formats."""

import pytest
import torch

import pdserve.kernels.block_copy as reference
from pdserve.kernels.kv_rows import pack_rows
from pdserve.kernels.triton.block_copy import copy_blocks, gather_blocks, scatter_blocks

_DTYPES = (torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn)


def _blocks(dtype: torch.dtype, device: torch.device, head_dim: int = 40, block_size: int = 8) -> torch.Tensor:
    values = torch.randn(6, 2, 2, 3, block_size, head_dim, generator=torch.Generator().manual_seed(0))
    return pack_rows(values, dtype).to(device)


def _bytes(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.uint8).cpu()


def _gathered(blocks: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the reference gathers on the CPU: on a GPU torch divides by multiplying, which rounds scales otherwise."""
    return _bytes(reference.gather_blocks(blocks.cpu(), ids.cpu(), dtype))


@pytest.mark.parametrize("target", _DTYPES)
@pytest.mark.parametrize("source", _DTYPES)
def test_gathered_and_scattered_as_the_reference(
    device: torch.device, source: torch.dtype, target: torch.dtype
) -> None:
    _assert_moved_as_the_reference(_blocks(source, device), target)


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 13), (80, 16), (96, 32), (128, 64), (256, 128)])
def test_rows_and_blocks_of_other_sizes(device: torch.device, head_dim: int, block_size: int) -> None:
    _assert_moved_as_the_reference(_blocks(torch.float16, device, head_dim, block_size), torch.int8)


@pytest.mark.parametrize("target", [torch.float32, torch.int8])
def test_gathered_from_bfloat16(device: torch.device, target: torch.dtype) -> None:
    """The way back is not compared: the interpreter truncates where hardware rounds."""
    blocks, ids = _blocks(torch.bfloat16, device), torch.tensor([4, 0, 5], device=device)

    staging = gather_blocks(blocks, ids, target)

    assert torch.equal(_bytes(staging), _gathered(blocks, ids, target))


def _assert_moved_as_the_reference(blocks: torch.Tensor, target: torch.dtype) -> None:
    ids = torch.tensor([4, 0, 5], device=blocks.device)

    staging = gather_blocks(blocks, ids, target)

    assert torch.equal(_bytes(staging), _gathered(blocks, ids, target))
    ours, expected = torch.zeros_like(blocks), torch.zeros_like(blocks, device="cpu")
    scatter_blocks(staging, ours, ids)
    reference.scatter_blocks(staging.cpu(), expected, ids.cpu())
    assert torch.equal(_bytes(ours), _bytes(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("head_dim", [40, 41])
def test_copy_changes_the_targets_only(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    blocks = _blocks(dtype, device, head_dim)
    before = blocks.clone()

    copy_blocks(blocks, torch.tensor([1, 1], device=device), torch.tensor([0, 5], device=device))

    assert torch.equal(blocks, before[[1, 1, 2, 3, 4, 1]])


def test_no_blocks(device: torch.device) -> None:
    blocks, ids = _blocks(torch.float16, device), torch.zeros(0, dtype=torch.int64, device=device)

    scatter_blocks(blocks[:0], blocks, ids)
    scatter_blocks(gather_blocks(blocks, ids, torch.int8), blocks, ids)
    copy_blocks(blocks, ids, ids)

    assert torch.equal(blocks, _blocks(torch.float16, device))
    assert gather_blocks(blocks, ids, torch.int8).shape == (0, 2, 2, 3, 8, 44)
    assert gather_blocks(blocks, ids, torch.float16).shape == (0, 2, 2, 3, 8, 40)


def test_blocks_of_another_shape_are_refused(device: torch.device) -> None:
    blocks, ids = _blocks(torch.float32, device), torch.tensor([0], device=device)

    with pytest.raises(ValueError, match="do not fit"):
        scatter_blocks(_blocks(torch.float16, device, 64)[:1], blocks, ids)
    with pytest.raises(ValueError, match="one after another"):
        gather_blocks(blocks[:, :1], ids, torch.float32)
