"""The operations of a decoder on a GPU: Triton kernels around the matrix products of torch or our own."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pdserve.kernels.activation import Activation
from pdserve.kernels.attention import AttentionSpan
from pdserve.kernels.decode_attention import DecodeBatch
from pdserve.kernels.fused_layer import FusedLayer, GatedLayer, Weight
from pdserve.kernels.int8_linear import Int8Weight
from pdserve.kernels.prefill_attention import PrefillBatch
from pdserve.kernels.triton.activation import gated_activation
from pdserve.kernels.triton.decode_attention import decode_attention
from pdserve.kernels.triton.kv_store import store_kv
from pdserve.kernels.triton.linear import linear
from pdserve.kernels.triton.prefill_attention import prefill_attention
from pdserve.kernels.triton.rms_norm import rms_norm
from pdserve.kernels.triton.rope import apply_rope


class SpanLayout:
    """The spans of a batch: those of one token for the decode kernel, the others in tiles for the prefill kernel.

    `decode_rows` [num_decoded] int64 are the rows of the first kind; None: all rows are.
    """

    def __init__(
        self,
        decode: DecodeBatch | None,
        decode_rows: Tensor | None,
        chunks: Sequence[AttentionSpan],
        device: torch.device,
    ) -> None:
        self.decode = decode
        self.decode_rows = decode_rows
        self._chunks = chunks
        self._device = device
        self._prefill: dict[tuple[int, torch.dtype], PrefillBatch] = {}

    @classmethod
    def of(cls, spans: Sequence[AttentionSpan], device: torch.device) -> "SpanLayout":
        """Lay spans out whose tables are on the host."""
        single = [span for span in spans if span.query_len == 1]
        chunks = [span for span in spans if span.query_len > 1]
        if not single:
            return cls(None, None, chunks, device)
        lens = [span.context_len for span in single]
        context_lens = torch.tensor(lens, dtype=torch.int32).to(device)
        rows = torch.tensor([span.query_start for span in single], dtype=torch.int64).to(device) if chunks else None
        return cls(DecodeBatch(_tables(single).to(device), context_lens, max(lens)), rows, chunks, device)

    @classmethod
    def of_decode(cls, decode: DecodeBatch) -> "SpanLayout":
        """Lay a batch out in which every row is one token of a sequence of its own."""
        return cls(decode, None, (), decode.context_lens.device)

    def prefill(self, heads_per_kv_head: int, dtype: torch.dtype) -> PrefillBatch | None:
        """Return the tiles, cut once for all layers."""
        if not self._chunks:
            return None
        key = heads_per_kv_head, dtype
        if key not in self._prefill:
            sequences = [(span.query_start, span.query_len, span.context_len) for span in self._chunks]
            self._prefill[key] = PrefillBatch.of(
                _tables(self._chunks).to(self._device), sequences, heads_per_kv_head, dtype
            )
        return self._prefill[key]


class TritonOperations:
    """Any dtype, dense weights or weights of 8 bits.

    Batch-invariant: a row's bits depend on its sequence alone, at the price of fixed splits and of our own matrix
    products; a token computed in a prompt chunk may still differ in its last bits from the same one decoded.
    """

    has_own_threads = False

    def __init__(self, device: torch.device, *, is_int8: bool, is_batch_invariant: bool) -> None:
        self._device = device
        self._is_int8 = is_int8
        self._is_batch_invariant = is_batch_invariant

    @property
    def description(self) -> str:
        """Who performs them, for the log."""
        return "Triton kernels, batch-invariant" if self._is_batch_invariant else "Triton kernels"

    def pack(self, weight: Tensor) -> Weight:
        if not self._is_int8:
            return weight
        packed = Int8Weight.of(weight)
        return Int8Weight(packed.values.to(weight.device), packed.scales.to(weight.device))

    def pack_unrounded(self, weight: Tensor) -> Weight:
        return weight

    def linear(self, rows: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, Tensor | Int8Weight)
        if isinstance(weight, Tensor) and not self._is_batch_invariant:
            return F.linear(rows, weight, bias)
        return linear(rows, weight, bias, is_batch_invariant=self._is_batch_invariant)

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        rows = F.embedding(token_ids, weight) if isinstance(weight, Tensor) else weight.rows(token_ids)
        if not self._is_int8:
            return rows
        return rows.to(torch.bfloat16 if self._device.type == "cuda" else torch.float32)  # stored as it may be

    def rms_norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(rows, weight, eps)

    def norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(heads, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return gated_activation(gate_up, Activation.SILU)

    def rope_store(
        self, heads: Tensor, rotation: tuple[Tensor, Tensor] | None, kv_blocks: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        num_kv_heads = kv_blocks.shape[2]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        rotated = heads[:, : num_heads + num_kv_heads]
        if rotation is not None:
            rotated = apply_rope(rotated, *rotation)
        store_kv(rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :], kv_blocks, slot_mapping)
        return rotated[:, :num_heads]

    def prepare(self, spans: Sequence[AttentionSpan]) -> Any:
        return SpanLayout.of(spans, self._device)

    def attention(
        self, query: Tensor, kv_blocks: Tensor, spans: Any, scale: float, window: int | None, soft_cap: float | None
    ) -> Tensor:
        assert isinstance(spans, SpanLayout)
        is_invariant = self._is_batch_invariant
        if spans.decode is not None and spans.decode_rows is None:
            return decode_attention(
                query, kv_blocks, spans.decode, scale, window, soft_cap, is_batch_invariant=is_invariant
            )
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        prefill = spans.prefill(query.shape[1] // kv_blocks.shape[2], query.dtype)
        if prefill is not None:
            prefill_attention(query, kv_blocks, prefill, scale, window, soft_cap, output=output)
        if spans.decode is not None:
            own = query[spans.decode_rows]
            output[spans.decode_rows] = decode_attention(
                own, kv_blocks, spans.decode, scale, window, soft_cap, is_batch_invariant=is_invariant
            )
        return output

    def fuse(self, layer: GatedLayer) -> FusedLayer | None:
        return None

    def run_layers(
        self,
        layers: Sequence[FusedLayer],
        hidden: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor] | None],
        kv_layers: Sequence[Tensor],
        slot_mapping: Tensor,
        spans: Any,
    ) -> None:
        raise RuntimeError("no layer is fused: `fuse` gave none")


def _tables(spans: Sequence[AttentionSpan]) -> Tensor:
    """[num_spans, most blocks] int32, on the host as the spans' own tables are."""
    return pad_sequence([span.block_table for span in spans], batch_first=True).to(torch.int32)
