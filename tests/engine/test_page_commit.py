"""Memory of the KV pool is there before prompts need it, and no more of it than a margin ahead of the blocks in use."""

import asyncio
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.engine import page_commit
from pdserve.engine.block_pool import BlockId
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.page_commit import PageCommit

MIB = 2**20


def _resident_bytes(address: int, num_bytes: int) -> int:
    """Return how many bytes of pages that lie in a stretch of memory the system has given."""
    first = -(-address // mmap.PAGESIZE)
    count = (address + num_bytes) // mmap.PAGESIZE - first
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(8 * first)
        entries = np.frombuffer(pagemap.read(8 * count), dtype=np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE


def test_pages_are_taken_a_margin_ahead_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_commit, "MARGIN_BYTES", 16 * MIB)
    memory = np.frombuffer(mmap.mmap(-1, 64 * MIB), dtype=np.uint8)  # new memory; numpy's may have been in use before
    pages = PageCommit(memory.ctypes.data, memory.nbytes)
    if not pages.advance(0):
        pytest.skip("this system takes no pages ahead")

    while pages.advance(0):
        pass
    resident = _resident_bytes(memory.ctypes.data, memory.nbytes)
    assert pages.num_committed == 16 * MIB
    assert 16 * MIB <= resident <= 20 * MIB  # a huge page at either end

    while pages.advance(60 * MIB):
        pass
    assert 64 * MIB - 2 * mmap.PAGESIZE < pages.num_committed <= 64 * MIB
    assert not pages.advance(0), "what was used and freed needs nothing more"
    assert not memory.any()


def test_what_blocks_hold_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_commit, "_PIECE_BYTES", 64 * 1024)
    cache = KVCache.allocate(64, 2, 2, 16, 32, torch.float32)
    written = torch.rand_like(cache.layer(0)[5])
    cache.layer(0)[5].copy_(written)

    while cache.commit_ahead(BlockId(5)):
        pass

    assert torch.equal(cache.layer(0)[5], written)


def test_a_system_that_takes_no_pages_ahead_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.zeros(16 * MIB, dtype=np.uint8)
    monkeypatch.setattr(page_commit, "_MADV_POPULATE_WRITE", 9999)
    pages = PageCommit(memory.ctypes.data, memory.nbytes)

    assert not pages.advance(0)
    assert (pages.num_committed, pages._is_offered) == (0, False)


async def test_an_idle_engine_has_its_first_blocks_at_hand(tiny_model: Any) -> None:
    engine = Engine.load(EngineConfig(model_dir=tiny_model(), num_blocks=256))
    async with EngineThread.start(engine) as thread, asyncio.timeout(30):
        while not await thread.call(lambda engine: engine._runner.kv_cache.num_committed_bytes):
            pass  # each call is a wait for the thread
