"""Causal attention over a paged KV cache, for any mix of prompt chunks and single decode tokens."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.kv_rows import expand_rows


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """One sequence of a batch: queries [query_start, query_start + query_len) are its last `query_len` tokens.

    The spans of a batch follow one another without a gap. `block_table` covers exactly the blocks that hold the
    `context_len` tokens (cached ones and the new ones).
    """

    query_start: int
    query_len: int
    context_len: int
    block_table: Tensor  # [ceil(context_len / block_size)] int64


class FlatSpans(Sequence[AttentionSpan]):
    """The spans of a batch as numbers in two arrays: of a decode step, a tensor for each would cost more than all else.

    A place is query_start, query_len, context_len and where the table begins among the tables.
    """

    __slots__ = ("_spans", "places", "tables")

    def __init__(self, places: "array[int]", tables: Tensor) -> None:
        self.places = places
        self.tables = tables  # [num_entries] int64: all block tables, one after another
        self._spans: tuple[AttentionSpan, ...] | None = None  # made when one is asked for

    def __len__(self) -> int:
        return len(self.places) // 4

    @overload
    def __getitem__(self, index: int) -> AttentionSpan: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[AttentionSpan, ...]: ...

    def __getitem__(self, index: int | slice) -> AttentionSpan | tuple[AttentionSpan, ...]:
        if self._spans is None:
            starts, lengths, context_lens, begins = (self.places[field::4] for field in range(4))
            tables = (self.tables[slice(*each)] for each in pairwise((*begins, len(self.tables))))
            self._spans = tuple(map(AttentionSpan, starts, lengths, context_lens, tables))
        return self._spans[index]


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    kv_blocks: Tensor,  # [num_blocks, 2, num_kv_heads, block_size, row_elements], one layer of the cache
    spans: Sequence[AttentionSpan],
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,  # [num_heads] float32
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """out = softmax(cap(scale * Q K^T) - slope * distance + causal mask) V for each span on its own.

    cap(x) = soft_cap * tanh(x / soft_cap); without a soft cap, x. Slopes are ALiBi's (Press et al. 2022), one a head;
    without, 0.
    With a window, a query at position p sees the positions (p - window, p]; blocks before all of them are not read.
    Each sequence is computed by itself, with nothing padded, so that its result cannot depend on its neighbours.
    """
    by_block = kv_blocks.permute(1, 2, 0, 3, 4)  # [2, num_kv_heads, num_blocks, block_size, row_elements]
    outputs = []
    for span in spans:
        own = query[span.query_start : span.query_start + span.query_len]
        keys, values = expand_rows(_gather(by_block, span, window), query.dtype)
        mask = causal_mask(span.query_len, keys.shape[1], query.device, window)
        if soft_cap is None and alibi_slopes is None:
            outputs.append(_attend(own, keys, values, mask, scale))
        else:
            outputs.append(_attend_scores(_scores(own, keys, scale, soft_cap, alibi_slopes), values, mask))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs) if outputs else torch.empty_like(query)


def causal_mask(query_len: int, key_len: int, device: torch.device, window: int | None = None) -> Tensor | None:
    """Return [query_len, key_len] bool, True where the query may look; None when every query sees all keys.

    The queries are the last `query_len` of the keys' positions.
    """
    if query_len == 1 and (window is None or key_len <= window):
        return None
    offset = key_len - query_len
    seen = torch.ones(query_len, key_len, dtype=torch.bool, device=device).tril(offset)
    return seen if window is None or key_len <= window else seen.triu(offset - window + 1)


def _gather(by_block: Tensor, span: AttentionSpan, window: int | None) -> Tensor:
    """Return keys and values [2, num_kv_heads, key_len, row_elements] of the positions that any query may see."""
    block_table, context_len, first = span.block_table, span.context_len, 0
    if window is not None:
        first = max(0, context_len - span.query_len - window + 1)
        block_size = by_block.shape[3]
        first_block = first // block_size
        block_table = block_table[first_block:]
        context_len -= first_block * block_size
        first -= first_block * block_size
    return by_block.index_select(2, block_table).flatten(2, 3)[:, :, first:context_len]


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1)


def _scores(
    query: Tensor, keys: Tensor, scale: float, soft_cap: float | None, alibi_slopes: Tensor | None
) -> Tensor:  # [num_kv_heads, heads_per_kv_head, query_len, key_len] float32
    query_len, num_heads, head_dim = query.shape
    num_kv_heads, key_len = keys.shape[:2]
    grouped = query.view(query_len, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped.float(), keys.float().unsqueeze(1).transpose(2, 3)) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if alibi_slopes is not None:
        positions = torch.arange(key_len, device=query.device)
        distances = positions[key_len - query_len :, None] - positions
        scores = scores - alibi_slopes.view(num_kv_heads, -1, 1, 1) * distances
    return scores


def _attend_scores(scores: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    probabilities = torch.softmax(scores, dim=-1).to(values.dtype)
    return torch.matmul(probabilities, values.unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2)
