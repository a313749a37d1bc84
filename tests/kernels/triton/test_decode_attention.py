"""Split paged attention of one token a sequence against the torch reference of the same name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pdserve.kernels.decode_attention import DecodeBatch
from pdserve.kernels.decode_attention import decode_attention as reference
from pdserve.kernels.triton.decode_attention import decode_attention

pytestmark = pytest.mark.timeout(300)

MakeInputs = Callable[..., Any]

_LENGTHS = ((1, 1), (1, 17), (1, 64), (1, 90))
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}
_SHAPES = {
    "head-dim-40": {"head_dim": 40, "heads_per_kv_head": 1, "block_size": 8},
    "head-dim-64-int8": {"head_dim": 64, "heads_per_kv_head": 2, "block_size": 13, "kv_dtype": torch.int8},
    "head-dim-64-fp8": {"head_dim": 64, "heads_per_kv_head": 2, "kv_dtype": torch.float8_e4m3fn},
    "head-dim-80-float16": {"head_dim": 80, "heads_per_kv_head": 3, "dtype": torch.float16},
    "head-dim-96-int8-bfloat16": {
        "head_dim": 96, "heads_per_kv_head": 4, "block_size": 32, "kv_dtype": torch.int8, "dtype": torch.bfloat16
    },
    "head-dim-128": {"head_dim": 128, "heads_per_kv_head": 5, "block_size": 64},
    "head-dim-256-bfloat16": {"head_dim": 256, "heads_per_kv_head": 6, "block_size": 128, "dtype": torch.bfloat16},
    "head-dim-256": {"head_dim": 256, "heads_per_kv_head": 2},
    "seven-heads": {"heads_per_kv_head": 7, "num_kv_heads": 1},
    "eight-heads-float16-cache": {"heads_per_kv_head": 8, "num_kv_heads": 1, "kv_dtype": torch.float16},
    "nine-heads": {"heads_per_kv_head": 9, "num_kv_heads": 3, "block_size": 8},
}  # fmt: skip
_RULES = ((None, None), (7, None), (70, 2.0), (None, 2.0))  # window and soft cap; ALiBi goes with every other shape


@pytest.mark.parametrize("name", list(_SHAPES))
def test_equals_the_reference(make_inputs: MakeInputs, name: str) -> None:
    inputs = make_inputs(sequences=_LENGTHS, **_SHAPES[name])
    batch = DecodeBatch(inputs.block_tables, inputs.context_lens, 90)
    index = list(_SHAPES).index(name)
    rule = (*_RULES[index % len(_RULES)], inputs.alibi_slopes if index % 2 else None)

    output = decode_attention(inputs.query, inputs.kv_blocks, batch, 0.3, *rule)

    expected = reference(inputs.query, inputs.kv_blocks, batch, 0.3, *rule)
    assert output.dtype == expected.dtype
    torch.testing.assert_close(output, expected, atol=_TOLERANCE[output.dtype], rtol=0)


@pytest.mark.parametrize("window", [None, 600])
def test_parts_of_a_long_context_are_merged(make_inputs: MakeInputs, window: int | None) -> None:
    inputs = make_inputs(sequences=((1, 1300), (1, 513), (1, 512)), num_kv_heads=1, heads_per_kv_head=3)
    batch = DecodeBatch(inputs.block_tables, inputs.context_lens, 1300)

    output = decode_attention(inputs.query, inputs.kv_blocks, batch, 0.3, window)

    expected = reference(inputs.query, inputs.kv_blocks, batch, 0.3, window)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=0)


def test_a_context_of_33000_tokens(make_inputs: MakeInputs) -> None:
    inputs = make_inputs(sequences=((1, 33_000),), head_dim=40, num_kv_heads=1, block_size=128, dtype=torch.float16)
    batch = DecodeBatch(inputs.block_tables, inputs.context_lens, 33_000)

    output = decode_attention(inputs.query, inputs.kv_blocks, batch, 0.3)

    expected = reference(inputs.query.float(), inputs.kv_blocks.float(), batch, 0.3)
    torch.testing.assert_close(output.float(), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_batch_invariant_a_row_has_the_same_bits_alone(make_inputs: MakeInputs, kv_dtype: torch.dtype) -> None:
    inputs = make_inputs(
        sequences=((1, 1), (1, 1100), (1, 40), (1, 600)), num_kv_heads=1, heads_per_kv_head=3, kv_dtype=kv_dtype
    )
    tables, lens = inputs.block_tables, inputs.context_lens

    together = decode_attention(
        inputs.query, inputs.kv_blocks, DecodeBatch(tables, lens, 1100), 0.3, is_batch_invariant=True
    )

    for row, span in enumerate(inputs.spans):
        own = slice(row, row + 1)
        alone = DecodeBatch(span.block_table[None], lens[own], span.context_len)
        again = decode_attention(inputs.query[own], inputs.kv_blocks, alone, 0.3, is_batch_invariant=True)
        assert torch.equal(again, together[own])


def test_empty_batch_and_empty_row(make_inputs: MakeInputs) -> None:
    inputs = make_inputs(sequences=((1, 5),))
    nothing = DecodeBatch(inputs.block_tables[:0], inputs.context_lens[:0], 0)
    idle = DecodeBatch(inputs.block_tables, torch.zeros_like(inputs.context_lens), 0)

    assert decode_attention(inputs.query[:0], inputs.kv_blocks, nothing, 0.3).shape == (0, 4, 64)
    assert not decode_attention(inputs.query, inputs.kv_blocks, idle, 0.3).any()


def test_queries_that_do_not_fit_the_cache_are_refused(make_inputs: MakeInputs) -> None:
    inputs = make_inputs(sequences=((1, 5),))
    batch = DecodeBatch(inputs.block_tables, inputs.context_lens, 5)

    with pytest.raises(ValueError, match="do not fit a cache"):
        decode_attention(inputs.query[:, :3], inputs.kv_blocks, batch, 0.3)
