"""Paged attention of prompt chunks against the torch reference of the same name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pdserve.kernels.prefill_attention import PrefillBatch
from pdserve.kernels.prefill_attention import prefill_attention as reference
from pdserve.kernels.triton.prefill_attention import prefill_attention

pytestmark = pytest.mark.timeout(300)

MakeInputs = Callable[..., Any]

_MIXED = ((1, 1), (1, 17), (5, 5), (7, 40), (33, 33), (16, 48))
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}
_SHAPES = {
    "head-dim-40-int8": {"head_dim": 40, "heads_per_kv_head": 9, "block_size": 8, "kv_dtype": torch.int8},
    "head-dim-64": {"head_dim": 64, "heads_per_kv_head": 8, "block_size": 13},
    "head-dim-80-float16": {"head_dim": 80, "heads_per_kv_head": 7, "dtype": torch.float16},
    "head-dim-96-bfloat16": {"head_dim": 96, "heads_per_kv_head": 6, "block_size": 32, "dtype": torch.bfloat16},
    "head-dim-128": {"head_dim": 128, "heads_per_kv_head": 5, "block_size": 64},
    "head-dim-256-float16": {"head_dim": 256, "heads_per_kv_head": 4, "block_size": 128, "dtype": torch.float16},
    "three-heads-fp8-float16": {
        "heads_per_kv_head": 3, "kv_dtype": torch.float8_e4m3fn, "dtype": torch.float16
    },
    "two-heads-int8-float16": {"heads_per_kv_head": 2, "kv_dtype": torch.int8, "dtype": torch.float16},
    "head-dim-256": {"head_dim": 256, "heads_per_kv_head": 2},
    "one-head": {"heads_per_kv_head": 1, "num_kv_heads": 3},
}  # fmt: skip
_RULES = ((None, None), (9, None), (20, 2.0), (None, 2.0))  # window and soft cap; ALiBi goes with every other shape


def _batch(inputs: Any, rows: slice = slice(None)) -> PrefillBatch:
    spans = inputs.spans[rows]
    group = inputs.query.shape[1] // inputs.kv_blocks.shape[2]
    start = spans[0].query_start
    sequences = [(span.query_start - start, span.query_len, span.context_len) for span in spans]
    return PrefillBatch.of(inputs.block_tables[rows], sequences, group, inputs.query.dtype)


@pytest.mark.parametrize("name", list(_SHAPES))
def test_equals_the_reference(make_inputs: MakeInputs, name: str) -> None:
    inputs = make_inputs(sequences=_MIXED, **{"num_kv_heads": 1, **_SHAPES[name]})
    index = list(_SHAPES).index(name)
    rule = (*_RULES[index % len(_RULES)], inputs.alibi_slopes if index % 2 else None)

    output = prefill_attention(inputs.query, inputs.kv_blocks, _batch(inputs), 0.3, *rule)

    expected = reference(inputs.query, inputs.kv_blocks, _batch(inputs), 0.3, *rule)
    torch.testing.assert_close(output, expected, atol=_TOLERANCE[output.dtype], rtol=0)


def test_a_chunk_at_the_end_of_33000_tokens(make_inputs: MakeInputs) -> None:
    inputs = make_inputs(
        sequences=((20, 33_000),),
        head_dim=40,
        num_kv_heads=1,
        heads_per_kv_head=1,
        block_size=128,
        dtype=torch.float16,
    )

    output = prefill_attention(inputs.query, inputs.kv_blocks, _batch(inputs), 0.3)

    expected = reference(inputs.query.float(), inputs.kv_blocks.float(), _batch(inputs), 0.3)
    torch.testing.assert_close(output.float(), expected, atol=2e-3, rtol=0)


def test_a_sequence_has_the_same_bits_alone(make_inputs: MakeInputs) -> None:
    inputs = make_inputs(sequences=_MIXED, num_kv_heads=1, heads_per_kv_head=3)

    together = prefill_attention(inputs.query, inputs.kv_blocks, _batch(inputs), 0.3)

    for index, span in enumerate(inputs.spans):
        rows = slice(span.query_start, span.query_start + span.query_len)
        alone = _batch(inputs, slice(index, index + 1))
        assert torch.equal(prefill_attention(inputs.query[rows], inputs.kv_blocks, alone, 0.3), together[rows])


def test_more_heads_share_a_kv_head_than_a_tile_usually_has_rows(make_inputs: MakeInputs) -> None:
    inputs = make_inputs(sequences=((3, 5), (1, 2)), head_dim=40, num_kv_heads=1, heads_per_kv_head=71)

    output = prefill_attention(inputs.query, inputs.kv_blocks, _batch(inputs), 0.3)

    expected = reference(inputs.query, inputs.kv_blocks, _batch(inputs), 0.3)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=0)


def test_empty_batch(make_inputs: MakeInputs) -> None:
    inputs = make_inputs(sequences=((1, 5),))
    nothing = PrefillBatch.of(inputs.block_tables[:0], [], 2, torch.float32)

    assert prefill_attention(inputs.query[:0], inputs.kv_blocks, nothing, 0.3).shape == (0, 4, 64)
