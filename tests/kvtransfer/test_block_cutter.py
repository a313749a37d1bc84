"""Blocks cut to another size, other heads, another dtype: every token lands where it belongs."""

from dataclasses import replace

import numpy as np
import pytest

from pdserve.kvtransfer import KVLayout
from pdserve.kvtransfer.block_cutter import BlockCutter, as_rows, expand
from pdserve.kvtransfer.block_run import BlockRun

BASE = KVLayout("m", num_layers=2, block_size=16, num_kv_heads=4, head_dim=8, dtype="float32")


def _tokens(num_tokens):
    """Return [num_layers, 2, num_kv_heads, num_tokens, head_dim] float32."""
    return np.random.default_rng(7).standard_normal((2, 2, 4, num_tokens, 8)).astype(np.float32)


def _blocks(values, layout):
    """Lay float32 values out in blocks; what is beyond the tokens is not a number."""
    num_tokens = values.shape[3]
    padded = np.full((2, 2, 4, layout.num_blocks(num_tokens) * layout.block_size, 8), np.nan, np.float32)
    padded[:, :, :, :num_tokens] = values
    held = padded[:, :, layout.heads.start : layout.heads.stop]
    size = layout.block_size
    return [
        memoryview(np.ascontiguousarray(held[:, :, :, start : start + size])).cast("B")
        for start in range(0, padded.shape[3], size)
    ]


def _runs(blocks, layout, order):
    return [BlockRun.of(index, blocks[index], layout.block_size_bytes) for index in order]


def _joined(cut, wire, num_tokens):
    blocks = [
        as_rows(expand(block, wire, replace(wire, dtype="float32")), replace(wire, dtype="float32")) for block in cut
    ]
    return np.concatenate(blocks, axis=3).view("<f4")[:, :, :, :num_tokens]


@pytest.mark.parametrize(
    ("own_size", "wire_size"), [(16, 32), (32, 16), (16, 16), (24, 16), (16, 24), (1, 7), (7, 1), (128, 8)]
)
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("is_backwards", [False, True])
def test_every_token_lands_where_it_belongs(own_size, wire_size, num_tokens, is_backwards):
    source, wire = replace(BASE, block_size=own_size), replace(BASE, block_size=wire_size)
    values = _tokens(num_tokens)
    blocks = _blocks(values, source)
    cutter = BlockCutter(source, wire, num_tokens)
    order = range(len(blocks))[::-1] if is_backwards else range(len(blocks))

    cut = {}
    for run in _runs(blocks, source, order):
        for index in cutter.feed(run):
            assert index not in cut
            cut[index] = cutter.cut(index)

    assert sorted(cut) == list(range(wire.num_blocks(num_tokens)))
    assert all(block.nbytes == wire.block_size_bytes for block in cut.values())
    joined = _joined([cut[index] for index in sorted(cut)], wire, num_tokens)
    assert np.array_equal(joined, values)
    rest = np.frombuffer(cut[max(cut)], "<f4")
    assert np.isfinite(rest).all()  # nothing of what lay beyond the tokens has travelled


def test_a_block_leaves_when_its_last_token_is_there():
    source, wire = replace(BASE, block_size=4), replace(BASE, block_size=12)
    blocks = _blocks(_tokens(30), source)
    cutter = BlockCutter(source, wire, 30)

    complete = [cutter.feed(run) for run in _runs(blocks, source, range(8))]

    assert complete == [[], [], [0], [], [], [1], [], [2]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_a_shard_gets_its_heads_in_its_dtype(dtype):
    source = replace(BASE, head_range=(0, 3))
    wire = replace(BASE, block_size=8, head_range=(1, 3), dtype=dtype)
    values = _tokens(21)
    cutter = BlockCutter(source, wire, 21)

    indexes = [index for run in _runs(_blocks(values, source), source, (0, 1)) for index in cutter.feed(run)]
    joined = _joined([cutter.cut(index) for index in indexes], wire, 21)

    expected = values[:, :, 1:3]
    bound = {"float32": 0, "bfloat16": np.abs(expected) * 2**-8, "float16": np.abs(expected) * 2**-11 + 2**-25}.get(
        dtype, np.abs(expected).max(-1, keepdims=True) / 254 * (1 + 1e-5)
    )
    assert (np.abs(joined - expected) <= bound).all()


def test_a_block_outside_the_offer_is_refused():
    cutter = BlockCutter(BASE, replace(BASE, block_size=8), 20)

    with pytest.raises(ValueError, match=r"block 2 is outside \[0, 2\)"):
        cutter.feed(BlockRun.of(2, bytes(BASE.block_size_bytes), BASE.block_size_bytes))
