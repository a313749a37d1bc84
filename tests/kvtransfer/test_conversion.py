"""Transfers between ends that store blocks differently, over real sockets."""

from dataclasses import replace

import numpy as np
import pytest

from pdserve.kvtransfer import IntegrityError, KVLayout, LayoutMismatch, ReceiverConfig, SenderConfig, hash_blocks
from pdserve.kvtransfer.block_cutter import as_rows
from pdserve.kvtransfer.rows import convert_rows

LAYOUT = KVLayout("m", num_layers=2, block_size=16, num_kv_heads=4, head_dim=64, dtype="float32")
NUM_TOKENS = 75


def _values():
    return np.random.default_rng(3).standard_normal((2, 2, 4, NUM_TOKENS, 64)).astype(np.float32)


def _blocks(values, layout):
    """Lay values out as the layout stores them."""
    padded = np.zeros((2, 2, 4, layout.num_blocks(NUM_TOKENS) * layout.block_size, 64), np.float32)
    padded[:, :, :, :NUM_TOKENS] = values
    rows = convert_rows(padded[:, :, layout.heads.start : layout.heads.stop].view(np.uint8), "float32", layout.dtype)
    size = layout.block_size
    return [
        np.ascontiguousarray(rows[:, :, :, start : start + size]).tobytes() for start in range(0, rows.shape[3], size)
    ]


def _landed(pair, transfer_id="t1"):
    """Return what has landed as float32 [num_layers, 2, heads, num_tokens, head_dim]."""
    layout = pair.layout
    landed = pair.sink.landed[transfer_id]
    rows = [as_rows(memoryview(landed[index]), layout) for index in sorted(landed)]
    joined = np.concatenate(rows, axis=3)
    return convert_rows(joined, layout.dtype, "float32").view("<f4")[:, :, :, :NUM_TOKENS]


def _hasher(block_size):
    return hash_blocks(range(NUM_TOKENS), block_size, "", "m")


async def _ship(pair, source, values, transfer_id="t1"):
    transfer = await pair.sender.offer(pair.peer, transfer_id, _hasher, NUM_TOKENS, 30.0)
    needed = await transfer.granted()
    blocks = list(enumerate(_blocks(values, source)))
    await transfer.send_blocks(blocks[:2])
    await transfer.send_blocks(blocks[2:])
    await transfer.finish(b"")
    return needed


@pytest.mark.parametrize(
    ("source", "target", "options"),
    [
        ({}, {"dtype": "int8", "block_size": 32}, {}),
        ({"dtype": "int8"}, {"block_size": 8}, {}),
        ({"dtype": "int8"}, {"dtype": "int8", "block_size": 24}, {}),
        ({}, {"dtype": "bfloat16"}, {}),
        ({"dtype": "bfloat16", "block_size": 128}, {"dtype": "float16", "head_range": (2, 4)}, {}),
        ({"head_range": (0, 3)}, {"head_range": (1, 2)}, {}),
        ({}, {}, {"wire_dtype": "int8"}),
        ({}, {}, {"compression": "zstd"}),
        ({"dtype": "int8"}, {"block_size": 64}, {"compression": "zstd"}),
        ({"dtype": "int8"}, {"dtype": "bfloat16", "block_size": 13}, {}),
        ({"dtype": "int8"}, {"dtype": "float16"}, {}),
        ({"dtype": "bfloat16", "block_size": 9}, {"dtype": "bfloat16", "block_size": 31}, {"wire_dtype": "int8"}),
        ({"dtype": "float16"}, {"dtype": "bfloat16"}, {"wire_dtype": "int8", "compression": "zstd"}),
    ],
    ids=str,
)
async def test_values_arrive_within_the_bound_of_one_conversion(make_pair, source, target, options):
    source, target = replace(LAYOUT, **source), replace(LAYOUT, **target)
    pair = await make_pair(
        layout=target,
        sender_layout=source,
        sender_config=SenderConfig(**options),
        receiver_config=ReceiverConfig(credit_bytes=2 * target.block_size_bytes),
    )
    values = _values()

    needed = await _ship(pair, source, values)

    held = convert_rows(values.view(np.uint8), "float32", source.dtype)
    sent = convert_rows(held, source.dtype, "float32").view("<f4")[:, :, target.heads.start : target.heads.stop]
    bound = np.zeros_like(sent)
    if source.dtype != "int8" and "int8" in (target.dtype, options.get("wire_dtype")):
        bound += np.abs(sent).max(-1, keepdims=True) / 254 * (1 + 1e-5)
    if source.dtype != target.dtype or "wire_dtype" in options:  # rounded to, or widened to, the receiver's
        bound += (np.abs(sent) + bound) * {"bfloat16": 2**-8, "float16": 2**-11}.get(target.dtype, 0) + 2**-25
    assert (np.abs(_landed(pair) - sent) <= bound).all()
    assert list(needed) == list(range(target.num_blocks(NUM_TOKENS)))
    sent_counts, received = pair.sender.counts(), pair.receiver.counts()
    assert sent_counts.bytes_sent == received.bytes_received
    is_cut = (
        source != replace(target, dtype=source.dtype) or source.dtype != target.dtype or bool(options.get("wire_dtype"))
    )
    assert (sent_counts.blocks_converted > 0 or received.blocks_converted > 0) == is_cut


async def test_only_blocks_that_are_missing_are_cut(make_pair):
    target = replace(LAYOUT, block_size=32, dtype="int8")
    pair = await make_pair(layout=target, sender_layout=LAYOUT)
    pair.sink.present.update(_hasher(32)[:2])

    needed = await _ship(pair, LAYOUT, _values())

    counts = pair.sender.counts()
    assert list(needed) == [2]
    assert (counts.blocks_sent, counts.blocks_skipped, counts.blocks_converted) == (1, 2, 1)
    assert counts.bytes_sent == target.block_size_bytes


async def test_hashes_of_the_wrong_blocks_are_refused_here(make_pair):
    pair = await make_pair(layout=replace(LAYOUT, block_size=32), sender_layout=LAYOUT)

    with pytest.raises(LayoutMismatch, match="block_size differs: ours is 16, theirs is 32"):
        await pair.sender.offer(pair.peer, "t1", _hasher(16), NUM_TOKENS, 5.0)


async def test_a_shard_that_lacks_heads_is_refused_naming_them(make_pair):
    pair = await make_pair(layout=LAYOUT, sender_layout=replace(LAYOUT, head_range=(0, 2)))

    with pytest.raises(LayoutMismatch, match=r"head_range differs: ours is \(0, 2\), theirs is \(0, 4\)"):
        await pair.sender.offer(pair.peer, "t1", _hasher, NUM_TOKENS, 5.0)


async def test_a_scale_that_is_no_number_never_lands(make_pair):
    layout = replace(LAYOUT, dtype="int8")
    pair = await make_pair(layout=layout)
    values = _values()
    values[0, 1, 2, 40, 5] = np.nan

    with pytest.raises(IntegrityError) as caught:
        await _ship(pair, layout, values)

    assert caught.value.code == "wrong_scale"
    await pair.sink.wait_ended("t1")
    assert pair.sink.released == {"t1": "wrong_scale"}
    assert pair.receiver.counts().failures == {"wrong_scale": 1}


async def test_compressed_blocks_are_counted_and_fewer_bytes_travel(make_pair):
    pair = await make_pair(layout=LAYOUT, sender_config=SenderConfig(compression="zstd"))
    values = np.zeros_like(_values())

    await _ship(pair, LAYOUT, values)

    sent, received = pair.sender.counts(), pair.receiver.counts()
    assert sent.blocks_compressed == received.blocks_compressed == 5
    assert sent.bytes_sent == received.bytes_received < LAYOUT.block_size_bytes
    assert np.array_equal(_landed(pair), values)
