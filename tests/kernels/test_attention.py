"""Paged attention against the dense formula, over the shapes that break people."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pdserve.kernels.attention import AttentionSpan, causal_mask, paged_attention


@dataclass(frozen=True)
class _Case:
    """Sequences as (query_len, context_len); the context ends with the queries."""

    sequences: tuple[tuple[int, int], ...]
    head_dim: int = 64
    num_kv_heads: int = 2
    heads_per_kv_head: int = 2
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    has_alibi: bool = False
    dtype: torch.dtype = torch.float32


_MIXED = ((1, 1), (1, 17), (5, 5), (7, 40), (33, 33), (1, 64), (16, 48))
_CASES: dict[str, _Case] = {
    **{f"head-dim-{size}": _Case(_MIXED, head_dim=size) for size in (40, 64, 80, 96, 128, 256)},
    **{f"{count}-heads-a-kv-head": _Case(_MIXED, heads_per_kv_head=count) for count in range(1, 10)},
    "one-kv-head-for-all": _Case(_MIXED, num_kv_heads=1, heads_per_kv_head=9),
    "three-kv-heads": _Case(_MIXED, num_kv_heads=3, heads_per_kv_head=3),
    **{f"block-size-{size}": _Case(_MIXED, block_size=size) for size in (8, 13, 16, 32, 64, 128)},
    **{f"length-{length}": _Case(((length, length), (1, length))) for length in (1, 2, 15, 16, 17, 31, 32, 33)},
    "long-decode": _Case(((1, 4097),), head_dim=40),
    "one-token-prompt": _Case(((1, 1),)),
    **{f"window-{size}": _Case(_MIXED, window=size) for size in (1, 2, 7, 8, 16, 17, 33, 1000)},
    "window-in-chunk-on-long-prefix": _Case(((16, 200), (1, 200), (3, 99)), block_size=8, window=20),
    "window-of-one-kv-head": _Case(_MIXED, num_kv_heads=1, heads_per_kv_head=4, head_dim=256, window=9),
    "soft-cap": _Case(_MIXED, soft_cap=2.0),
    "soft-cap-and-window": _Case(_MIXED, soft_cap=1.5, window=8, heads_per_kv_head=3, head_dim=80, block_size=8),
    "alibi": _Case(_MIXED, has_alibi=True, heads_per_kv_head=3, head_dim=40),
    "alibi-soft-cap-and-window": _Case(_MIXED, has_alibi=True, soft_cap=2.0, window=9),
    "alibi-bfloat16": _Case(_MIXED, has_alibi=True, dtype=torch.bfloat16),
    "bfloat16": _Case(_MIXED, dtype=torch.bfloat16),
    "bfloat16-soft-cap": _Case(_MIXED, dtype=torch.bfloat16, soft_cap=2.0, window=8),
    "float16": _Case(_MIXED, dtype=torch.float16, window=16),
}
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@pytest.mark.parametrize("name", list(_CASES))
def test_equals_dense_attention_of_each_sequence(name: str) -> None:
    case = _CASES[name]
    query, kv_blocks, spans, contexts = _batch(case)

    output = paged_attention(query, kv_blocks, spans, 0.3, case.window, case.soft_cap, _slopes(case))

    assert output.dtype == case.dtype
    for span, (keys, values) in zip(spans, contexts, strict=True):
        rows = slice(span.query_start, span.query_start + span.query_len)
        expected = _dense(query[rows].double(), keys.double(), values.double(), case)
        torch.testing.assert_close(output[rows].double(), expected, atol=_TOLERANCE[case.dtype], rtol=0)


@pytest.mark.parametrize("name", ["window-8", "soft-cap-and-window", "alibi", "3-heads-a-kv-head", "bfloat16"])
def test_a_sequence_computes_the_same_bits_alone(name: str) -> None:
    case = _CASES[name]
    query, kv_blocks, spans, _ = _batch(case)

    together = paged_attention(query, kv_blocks, spans, 0.3, case.window, case.soft_cap, _slopes(case))

    for span in spans:
        rows = slice(span.query_start, span.query_start + span.query_len)
        alone = AttentionSpan(0, span.query_len, span.context_len, span.block_table)
        again = paged_attention(query[rows], kv_blocks, [alone], 0.3, case.window, case.soft_cap, _slopes(case))
        assert torch.equal(again, together[rows])


def test_blocks_before_the_window_are_not_read() -> None:
    """C154: their ids may be those of no block at all."""
    case = _Case(((4, 100), (1, 100)), block_size=8, window=10)
    query, kv_blocks, spans, _ = _batch(case)
    expected = paged_attention(query, kv_blocks, spans, 0.3, case.window)
    num_unseen = {4: (100 - 4 - 9) // 8, 1: (100 - 10) // 8}
    for span in spans:
        span.block_table[: num_unseen[span.query_len]] = 10**9

    output = paged_attention(query, kv_blocks, spans, 0.3, case.window)

    assert torch.equal(output, expected)


def test_slots_beyond_the_context_are_not_read() -> None:
    case = _Case(((3, 21), (1, 5)), block_size=16)
    query, kv_blocks, spans, _ = _batch(case)
    expected = paged_attention(query, kv_blocks, spans, 0.3)
    for span in spans:
        kv_blocks[span.block_table[-1], :, :, span.context_len % 16 :] = math.nan

    output = paged_attention(query, kv_blocks, spans, 0.3)

    assert torch.equal(output, expected)


def test_empty_batch() -> None:
    query, kv_blocks = torch.empty(0, 4, 64), torch.zeros(2, 2, 2, 16, 64)

    assert paged_attention(query, kv_blocks, [], 0.3).shape == (0, 4, 64)


def test_window_counts_the_token_itself() -> None:
    """C153: the current token and W - 1 before it."""
    mask = causal_mask(5, 5, torch.device("cpu"), window=2)

    assert mask is not None
    assert mask.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


def _batch(case: _Case) -> tuple[Tensor, Tensor, list[AttentionSpan], list[tuple[Tensor, Tensor]]]:
    """Return queries, a cache whose unused slots are not numbers, spans, and each sequence's own keys and values."""
    generator = torch.Generator().manual_seed(hash(case.sequences) % 1000)
    num_heads = case.num_kv_heads * case.heads_per_kv_head
    num_blocks = sum(-(-context_len // case.block_size) for _, context_len in case.sequences) + 3
    shape = (num_blocks, 2, case.num_kv_heads, case.block_size, case.head_dim)
    kv_blocks = torch.full(shape, math.nan, dtype=case.dtype)
    free = torch.randperm(num_blocks, generator=generator)
    spans, contexts, start = [], [], 0
    for query_len, context_len in case.sequences:
        count = -(-context_len // case.block_size)
        table, free = free[:count].clone(), free[count:]
        context = torch.randn(2, context_len, case.num_kv_heads, case.head_dim, generator=generator).to(case.dtype)
        for position in range(context_len):
            block_id = table[position // case.block_size]
            kv_blocks[block_id, :, :, position % case.block_size] = context[:, position]
        spans.append(AttentionSpan(start, query_len, context_len, table))
        contexts.append((context[0], context[1]))
        start += query_len
    query = torch.randn(start, num_heads, case.head_dim, generator=generator).to(case.dtype)
    return query, kv_blocks, spans, contexts


def _slopes(case: _Case) -> Tensor | None:
    """Those of Press et al. (2022), for a power of two of heads."""
    num_heads = case.num_kv_heads * case.heads_per_kv_head
    return 2.0 ** (-8 / num_heads * torch.arange(1, num_heads + 1)) if case.has_alibi else None


def _dense(query: Tensor, keys: Tensor, values: Tensor, case: _Case) -> Tensor:
    """One query and one head at a time, as the formula is written."""
    output = torch.empty_like(query)
    offset, slopes = len(keys) - len(query), _slopes(case)
    for row in range(len(query)):
        first = 0 if case.window is None else max(0, offset + row - case.window + 1)
        seen = slice(first, offset + row + 1)
        for head in range(query.shape[1]):
            kv_head = head // case.heads_per_kv_head
            scores = 0.3 * keys[seen, kv_head] @ query[row, head]
            if case.soft_cap is not None:
                scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
            if slopes is not None:
                scores = scores - slopes[head].double() * torch.arange(len(scores) - 1, -1, -1)
            output[row, head] = torch.softmax(scores, dim=0) @ values[seen, kv_head]
    return output
