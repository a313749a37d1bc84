"""Compression over a link that is really slow, and over one that is not: decided from what is measured there."""

import importlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pdserve.kvtransfer import KVLayout, block_source
from pdserve.kvtransfer.compression import pays
from pdserve.kvtransfer.encoding import compress

_BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "slow_link.py"
LAYOUT = KVLayout("m", num_layers=4, block_size=16, num_kv_heads=2, head_dim=64, dtype="bfloat16")


@pytest.fixture(scope="module")
def slow_link():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_BENCHMARK.parent))  # as a program has it: it imports modules beside it
        before = set(sys.modules)
        module = importlib.import_module(_BENCHMARK.stem)
    yield module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(_BENCHMARK.parent)):
            del sys.modules[name]


def _blocks(num_blocks, draw):
    numbers = draw(np.random.default_rng(7), num_blocks * LAYOUT.block_size_bytes // 2)
    data = (numbers.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()  # cut off to bfloat16
    return [data[start : start + LAYOUT.block_size_bytes] for start in range(0, len(data), LAYOUT.block_size_bytes)]


def _like_keys_and_values(random, size):
    return random.standard_normal(size) * 0.05  # what zstd leaves of these is what it leaves of the demo model's: 4/5


def _noise(random, size):
    return random.integers(1, 2**31 - 2**24, size, dtype="<u4").view("<f4")  # every bit of it is news


@pytest.fixture
def processor_time(monkeypatch):
    """Count of compressing what it takes of a processor, however long others keep that from it."""
    monkeypatch.setattr(block_source, "time", SimpleNamespace(perf_counter=time.thread_time))


@pytest.mark.usefixtures("processor_time")
async def test_a_throttled_link_turns_compression_on_by_itself_where_it_helps(slow_link):
    blocks = _blocks(48, _like_keys_and_values)  # 1.5 MiB: enough to know the link by
    assert 0.7 < sum(compress(memoryview(block)).nbytes for block in blocks) / sum(map(len, blocks)) < 0.87

    found = await slow_link.measure(LAYOUT, blocks, 10e6, "auto", rounds=2)

    assert found.num_compressed == found.num_blocks == 2 * len(blocks)
    assert found.num_bytes < 0.87 * found.num_blocks * LAYOUT.block_size_bytes


async def test_what_does_not_shrink_is_tried_and_travels_as_it_is_on_the_same_link(slow_link):
    blocks = _blocks(48, _noise)

    found = await slow_link.measure(LAYOUT, blocks, 10e6, "auto", rounds=2)

    assert found.num_compressed == 0
    assert found.num_bytes == found.num_blocks * LAYOUT.block_size_bytes


async def test_loopback_is_left_alone(slow_link):
    blocks = _blocks(192, _like_keys_and_values)

    found = await slow_link.measure(LAYOUT, blocks, None, "auto", rounds=3)

    slowest_bytes_per_s = len(blocks) * LAYOUT.block_size_bytes / max(found.seconds)
    if found.num_compressed and pays(slowest_bytes_per_s / 4, 400e6, 0.6):  # so busy a machine that a try was right
        pytest.skip(f"loopback carried {slowest_bytes_per_s / 1e6:.0f} MB/s here and now")
    assert found.num_compressed == 0
