"""The bridge from a decision in Python ints to tensors; the only one."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.scheduled_batch import ScheduledBatch, ScheduledSpan
from pdserve.kernels.attention import AttentionSpan, FlatSpans


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows [first_row, first_row + len(token_ids)): the logprob of each token given all up to its row is wanted."""

    seq_id: str
    first_row: int
    token_ids: Tensor  # [num_scored] int64
    num_top: int

    def parts(self, max_rows: int) -> Iterator["ScoredRows"]:
        """Return the same in parts of at most `max_rows`, in order."""
        for start in range(0, len(self.token_ids), max_rows):
            token_ids = self.token_ids[start : start + max_rows]
            yield ScoredRows(self.seq_id, self.first_row + start, token_ids, self.num_top)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step for the model, flattened over sequences.

    Spans, rope lengths and scored tokens stay on the host: what is decided by them is decided there.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    rope_lengths: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64
    spans: Sequence[AttentionSpan]
    sample_rows: Tensor  # [num_sampled] int64: the last row of each span that samples, and those of its drafts
    scored_rows: tuple[ScoredRows, ...] = ()
    layout: Any = None  # the spans as `Operations.prepare` lays them out, where that has been done

    @classmethod
    def build(cls, batch: ScheduledBatch, block_size: int) -> "ModelInput":
        """Lay a batch out.

        Numbers are collected first and made tensors at the end: of a decode step, with one token a sequence, the
        tensors of each sequence would cost more than all else.
        """
        rows = _Rows(block_size)
        sample_rows = array("q")
        scored = []
        for span in batch.spans:
            first_row, num_own = len(rows.token_ids), len(span.token_ids)
            if num_own:
                rows.add(span)
            if span.sampling is not None:  # of a branch, which has no tokens: the row that its leader ends with
                sample_rows.extend(range(first_row + num_own - 1, len(rows.token_ids) if num_own else first_row))
            if span.scored_token_ids:
                targets = torch.tensor(span.scored_token_ids, dtype=torch.int64)
                scored.append(ScoredRows(span.seq_id, first_row, targets, span.num_top_scores))
        return cls(
            token_ids=_tensor(rows.token_ids),
            positions=_tensor(rows.positions),
            rope_lengths=_tensor(rows.rope_lengths),
            slot_mapping=_tensor(rows.slots),
            spans=FlatSpans(rows.places, _tensor(rows.tables)),
            sample_rows=_tensor(sample_rows),
            scored_rows=tuple(scored),
        )

    def to(self, device: torch.device) -> "ModelInput":
        """Return the same with what is computed with on a device."""
        if device == self.token_ids.device:
            return self
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            slot_mapping=self.slot_mapping.to(device),
            sample_rows=self.sample_rows.to(device),
        )


class _Rows:
    """The rows of a batch while they are collected, and the places of its spans as `FlatSpans` has them."""

    __slots__ = ("_block_size", "places", "positions", "rope_lengths", "slots", "tables", "token_ids")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.token_ids, self.positions, self.rope_lengths, self.slots = (array("q") for _ in range(4))
        self.places, self.tables = array("q"), array("q")

    def add(self, span: ScheduledSpan) -> None:
        """Lay out a span's tokens and drafts.

        A prompt token is rotated by the prompt's length, an output token by its own position + 1.
        """
        block_size, table, start, num_prompt_tokens = (
            self._block_size, span.block_table, span.start, span.num_prompt_tokens
        )  # fmt: skip
        first_row, count = len(self.token_ids), len(span.token_ids) + len(span.draft_token_ids)
        end = start + count
        self.places.extend((first_row, count, end, len(self.tables)))
        self.tables.extend(table)
        if count == 1:
            self.token_ids.append(span.token_ids[0])
            self.positions.append(start)
            self.rope_lengths.append(max(end, num_prompt_tokens))
            self.slots.append(table[start // block_size] * block_size + start % block_size)
            return
        self.token_ids.extend(span.token_ids)
        self.token_ids.extend(span.draft_token_ids)
        self.positions.extend(range(start, end))
        self.rope_lengths.extend(max(place + 1, num_prompt_tokens) for place in range(start, end))
        self.slots.extend(table[place // block_size] * block_size + place % block_size for place in range(start, end))


def _tensor(numbers: "array[int]") -> Tensor:  # [len(numbers)] int64
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)
