"""Whole blocks of the KV cache: gathered into contiguous staging, scattered back, copied before they are written."""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-any-return,attr-defined"

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.kv_rows import row_elements
from pdserve.kernels.triton.rows import RowFormat, expand, write

_WORDS = 4096  # that a program moves
_ROWS = 32  # that a program converts
_SCALE_BYTES = 4


def gather_blocks(blocks: Tensor, block_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return blocks one after another, as kernels.block_copy.gather_blocks does."""
    size = (*blocks.shape[1:-1], row_elements(_head_dim(blocks), dtype))
    staging = torch.empty((len(block_ids), *size), dtype=dtype, device=blocks.device)
    _move(blocks, staging, block_ids, is_gather=True)
    return staging


def scatter_blocks(staging: Tensor, blocks: Tensor, block_ids: Tensor) -> None:
    """blocks[block_ids] = staging, as kernels.block_copy.scatter_blocks does."""
    _move(staging, blocks, block_ids, is_gather=False)


def copy_blocks(blocks: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """blocks[target_ids] = blocks[source_ids], as kernels.block_copy.copy_blocks does."""
    _move_words(blocks, blocks, source_ids, target_ids)


def _move(source: Tensor, target: Tensor, block_ids: Tensor, *, is_gather: bool) -> None:
    if source.shape[1:-1] != target.shape[1:-1] or _head_dim(source) != _head_dim(target):
        raise ValueError(f"blocks of {tuple(source.shape)} do not fit {tuple(target.shape)}")
    if source.dtype is target.dtype:
        order = torch.arange(len(block_ids), device=block_ids.device)
        _move_words(source, target, *((block_ids, order) if is_gather else (order, block_ids)))
        return
    _check(source, target)
    if not len(block_ids):
        return
    head_dim, num_rows = _head_dim(source), source[0].numel() // source.shape[-1]
    rows = [_rows(each) for each in (source, target)]
    convert_rows[(len(block_ids), triton.cdiv(num_rows, _ROWS))](
        rows[0].values, rows[0].scales, rows[1].values, rows[1].scales, block_ids, num_rows,
        source.shape[-1], target.shape[-1],
        IS_GATHER=is_gather, ROWS=_ROWS, HEAD_DIM=head_dim, DIMS=triton.next_power_of_2(head_dim),
        SOURCE=rows[0].name, TARGET=rows[1].name, num_warps=4,
    )  # fmt: skip


def _move_words(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    _check(source, target)
    if not len(source_ids):
        return
    size_bytes = source[0].numel() * source.element_size()
    word = torch.int32 if size_bytes % 4 == 0 else torch.uint8
    words = [each.flatten(1).view(torch.uint8).view(word) for each in (source, target)]
    num_words = size_bytes // word.itemsize
    move_words[(len(source_ids), triton.cdiv(num_words, _WORDS))](
        words[0], words[1], source_ids, target_ids, num_words, TILE=_WORDS, num_warps=8
    )


def _head_dim(blocks: Tensor) -> int:
    return blocks.shape[-1] - (_SCALE_BYTES if blocks.dtype is torch.int8 else 0)


def _rows(blocks: Tensor) -> RowFormat:
    """Whole blocks as one layer's rows: they lie one after another."""
    return RowFormat.of(blocks.view(len(blocks), 2, 1, -1, blocks.shape[-1]))


def _check(*tensors: Tensor) -> None:
    for each in tensors:
        if not each.is_contiguous():
            raise ValueError(f"blocks have to lie one after another, got strides {each.stride()}")


@triton.jit
def move_words(source, target, source_ids, target_ids, num_words, TILE: tl.constexpr):
    """A tile of one block, as it is."""
    index = tl.program_id(0)
    words = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = words < num_words
    start = tl.load(source_ids + index).to(tl.int64) * num_words
    end = tl.load(target_ids + index).to(tl.int64) * num_words
    tl.store(target + end + words, tl.load(source + start + words, mask=inside), mask=inside)


@triton.jit
def convert_rows(
    source, source_scales, target, target_scales, block_ids, num_rows, source_row, target_row,
    IS_GATHER: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    SOURCE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Some rows of one block, through float32."""
    index = tl.program_id(0).to(tl.int64)
    block_id = tl.load(block_ids + index).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    is_row = rows < num_rows
    first = (block_id if IS_GATHER else index) * num_rows + rows
    last = (index if IS_GATHER else block_id) * num_rows + rows
    values = expand(source, source_scales, first * source_row, dims, is_row, HEAD_DIM, SOURCE)
    write(target, target_scales, last * target_row, dims, values, is_row, HEAD_DIM, TARGET)
