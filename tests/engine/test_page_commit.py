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
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec

MIB = 2**20
_SAMPLING = SamplingParams(max_tokens=5, temperature=0.0, seed=0)


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


def test_half_of_the_margin_is_left_for_quiet_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_commit, "MARGIN_BYTES", 16 * MIB)
    memory = np.frombuffer(mmap.mmap(-1, 64 * MIB), dtype=np.uint8)
    pages = PageCommit(memory.ctypes.data, memory.nbytes)
    if not pages.advance(0, is_quiet=False):
        pytest.skip("this system takes no pages ahead")

    while pages.advance(0, is_quiet=False):
        pass
    assert pages.num_committed == 8 * MIB

    while pages.advance(0):
        pass
    assert pages.num_committed == 16 * MIB
    assert not pages.advance(8 * MIB, is_quiet=False)
    assert pages.advance(9 * MIB, is_quiet=False)


def test_blocks_that_are_no_whole_pages_leave_the_next_piece_one_to_begin_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_commit, "MARGIN_BYTES", 16 * MIB)
    memory = np.frombuffer(mmap.mmap(-1, 64 * MIB), dtype=np.uint8)
    pages = PageCommit(memory.ctypes.data, memory.nbytes)
    if not pages.advance(0):
        pytest.skip("this system takes no pages ahead")

    for num_used in (777, MIB + 777, 2 * MIB + 777):
        while pages.advance(num_used):
            pass
        assert num_used + 16 * MIB - mmap.PAGESIZE < pages.num_committed <= num_used + 16 * MIB


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


async def test_an_engine_that_holds_a_sequence_leaves_half_of_the_margin_for_later(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(EngineConfig(model_dir=tiny_model(), num_blocks=1_024))
    cache = engine._runner.kv_cache
    margin = 32 * cache.block_size_bytes
    monkeypatch.setattr(page_commit, "MARGIN_BYTES", margin)
    monkeypatch.setattr(page_commit, "_PIECE_BYTES", mmap.PAGESIZE)
    if not cache.commit_ahead(BlockId(0)):
        pytest.skip("this system takes no pages ahead")

    prompt = SequenceSpec("a", tuple(5 + index % 190 for index in range(490)), _SAMPLING)
    async with EngineThread.start(engine) as thread, asyncio.timeout(60):
        async with thread.importing(prompt) as (stream,):
            await stream.granted
            next_block = await thread.call(lambda engine: engine.pool.next_block)
            assert next_block is not None and next_block > 16
            num_used = next_block * cache.block_size_bytes
            while cache.num_committed_bytes < num_used + margin // 2 - mmap.PAGESIZE:
                await thread.call(lambda engine: None)  # each call is a wait for the thread
            for _ in range(20):
                await thread.call(lambda engine: None)
            assert cache.num_committed_bytes <= num_used + margin // 2
        while cache.num_committed_bytes < num_used + margin - mmap.PAGESIZE:
            await thread.call(lambda engine: None)


async def test_an_idle_engine_has_its_first_blocks_at_hand(tiny_model: Any) -> None:
    engine = Engine.load(EngineConfig(model_dir=tiny_model(), num_blocks=256))
    memory = np.frombuffer(mmap.mmap(-1, MIB), dtype=np.uint8)
    if not PageCommit(memory.ctypes.data, memory.nbytes).advance(0):
        pytest.skip("this system takes no pages ahead")

    async with EngineThread.start(engine) as thread, asyncio.timeout(30):
        while not await thread.call(lambda engine: engine._runner.kv_cache.num_committed_bytes):
            pass  # each call is a wait for the thread
