"""Caches of more elements than 32 bits count, as that of any large GPU is: the last block is as good as the first."""

import numpy as np
import pytest
import torch

from pdserve.kernels.decode_attention import DecodeBatch
from pdserve.kernels.prefill_attention import PrefillBatch
from pdserve.kernels.triton.block_copy import copy_blocks, gather_blocks, scatter_blocks
from pdserve.kernels.triton.decode_attention import decode_attention
from pdserve.kernels.triton.kv_store import store_kv
from pdserve.kernels.triton.prefill_attention import prefill_attention

pytestmark = pytest.mark.timeout(300)

_BLOCK = (2, 2, 1, 16, 64)  # of two layers
_BLOCK_BYTES = 2 * 2 * 16 * 64
_LAST = 2**31 // _BLOCK_BYTES + 2
_FP8 = torch.float8_e4m3fn


def _caches(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache whose last block begins beyond 2^31, and one of three blocks; of zeros, which take no memory on a CPU."""
    size, is_cpu = (_LAST + 1) * _BLOCK_BYTES, device.type == "cpu"
    large = (
        torch.from_numpy(np.zeros(size, np.uint8)) if is_cpu else torch.zeros(size, dtype=torch.uint8, device=device)
    )
    small = torch.zeros(3 * _BLOCK_BYTES, dtype=torch.uint8, device=device)
    return large.view(_FP8).view(_LAST + 1, *_BLOCK), small.view(_FP8).view(3, *_BLOCK)


def test_the_last_block_is_written_read_and_moved(device: torch.device) -> None:
    large, small = _caches(device)
    generator = torch.Generator().manual_seed(0)
    key, value, query = (torch.randn(2, heads, 64, generator=generator).to(device) for heads in (1, 1, 2))
    results = []

    for blocks, last in ((large, _LAST), (small, 2)):
        layer, ids = blocks[:, 1], torch.tensor([last], device=device)
        store_kv(key, value, layer, torch.tensor([16 * last, 16 * last + 1], device=device))
        table = ids[None].to(torch.int32)
        decode = DecodeBatch(table, torch.tensor([2], device=device), 2)
        prefill = PrefillBatch.of(table, [(0, 2, 2)], 2, torch.float32)
        attended = decode_attention(query[1:], layer, decode, 0.3), prefill_attention(query, layer, prefill, 0.3)
        copy_blocks(blocks, ids, ids - 1)
        scatter_blocks(gather_blocks(blocks, ids - 1, torch.int8), blocks, ids)
        moved = gather_blocks(blocks, ids, _FP8), gather_blocks(blocks, ids - 1, _FP8)
        results.append([*attended, *(each.view(torch.uint8) for each in moved)])

    assert all(map(torch.equal, *results))
    assert results[0][0].any() and results[0][2].any()
