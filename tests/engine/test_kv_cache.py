"""KVCache: a block is one run of bytes, and memory is committed only as it is used."""

import subprocess
import sys

import pytest
import torch

from pdserve.engine.block_pool import BlockId
from pdserve.engine.kv_cache import KVCache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_is_sent_and_landed_as_it_lies(dtype: torch.dtype) -> None:
    ours = KVCache.allocate(5, num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype=dtype)
    theirs = KVCache.allocate(7, num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype=dtype)
    for layer in range(3):
        ours.layer(layer).copy_(torch.randn(ours.layer(layer).shape))

    theirs.write_block(BlockId(6), ours.block_bytes(BlockId(1)))
    both = ours.block_bytes(BlockId(2), num_blocks=2)
    theirs.write_block(BlockId(0), both[: ours.block_size_bytes])
    theirs.write_block(BlockId(1), both[ours.block_size_bytes :])

    for layer in range(3):
        for source, target in ((1, 6), (2, 0), (3, 1)):
            assert torch.equal(ours.layer(layer)[source], theirs.layer(layer)[target])


def test_exported_bytes_cannot_be_written() -> None:
    cache = KVCache.allocate(2, num_layers=1, num_kv_heads=1, block_size=4, head_dim=8, dtype=torch.float32)

    assert cache.block_bytes(BlockId(0)).readonly


def test_untouched_blocks_cost_no_memory() -> None:
    """A gibibyte of blocks is reserved and one is written: resident memory grows by far less."""
    code = """
import torch
from pdserve.engine.kv_cache import KVCache
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
before = resident()
cache = KVCache.allocate(1024, 16, 4, 16, 128, torch.float32)
cache.layer(0)[5] = 1.0
print(cache.block_size_bytes * 1024, resident() - before)
"""
    reserved, grown = map(int, subprocess.check_output([sys.executable, "-c", code], text=True).split())

    assert reserved == 2**30
    assert grown < 2**27


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_land_in_their_places_layer_by_layer(dtype: torch.dtype) -> None:
    ours = KVCache.allocate(3, num_layers=3, num_kv_heads=4, block_size=4, head_dim=8, dtype=dtype)
    theirs = KVCache.allocate(3, num_layers=3, num_kv_heads=4, block_size=4, head_dim=8, dtype=dtype)
    for layer in range(3):
        ours.layer(layer).copy_(torch.randn(ours.layer(layer).shape))
    whole = torch.frombuffer(bytearray(ours.block_bytes(BlockId(1))), dtype=dtype).view(3, 2, 4, 4, 8)

    for heads in (range(1), range(1, 3), range(3, 4)):
        part = whole[:, :, heads.start : heads.stop].contiguous().view(torch.uint8).flatten().numpy().tobytes()
        size = len(part) // 3
        theirs.write_heads([(BlockId(2), memoryview(part)[:size])], heads)
        theirs.write_heads([(BlockId(2), memoryview(part)[size:])], heads, start=size)

    for layer in range(3):
        assert torch.equal(ours.layer(layer)[1], theirs.layer(layer)[2])
        assert not theirs.layer(layer)[:2].any()
