"""The bridge from a decision in Python ints to tensors; the only one."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.scheduled_batch import ScheduledBatch
from pdserve.kernels.attention import AttentionSpan


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
    spans: tuple[AttentionSpan, ...]
    sample_rows: Tensor  # [num_sampled] int64: the last row of each span that samples, and those of its drafts
    scored_rows: tuple[ScoredRows, ...] = ()
    layout: Any = None  # the spans as `Operations.prepare` lays them out, where that has been done

    @classmethod
    def build(cls, batch: ScheduledBatch, block_size: int) -> "ModelInput":
        """Lay a batch out.

        Numbers are collected first and made tensors at the end: of a decode step, with one token a sequence, the
        tensors of each sequence would cost more than all else.
        """
        token_ids, positions, rope_lengths, slots, blocks = (array("q") for _ in range(5))
        sample_rows: list[int] = []
        places: list[tuple[int, int, int]] = []
        num_blocks: list[int] = []
        scored = []
        for span in batch.spans:
            first_row = len(token_ids)
            if span.sampling is not None and not span.token_ids:  # a branch: the row that its leader ends with
                sample_rows.append(first_row - 1)
            if not span.token_ids:
                continue
            if span.scored_token_ids:
                targets = torch.tensor(span.scored_token_ids, dtype=torch.int64)
                scored.append(ScoredRows(span.seq_id, first_row, targets, span.num_top_scores))
            token_ids.extend(span.token_ids)
            token_ids.extend(span.draft_token_ids)
            start, end = span.start, span.start + len(token_ids) - first_row
            positions.extend(range(start, end))
            # A prompt token is rotated by the prompt's length, an output token by its own position + 1.
            rope_lengths.extend(max(place + 1, span.num_prompt_tokens) for place in range(start, end))
            table = span.block_table
            slots.extend(table[place // block_size] * block_size + place % block_size for place in range(start, end))
            blocks.extend(table)
            num_blocks.append(len(table))
            places.append((first_row, end - start, end))
            if span.sampling is not None:
                sample_rows.extend(range(len(token_ids) - 1 - len(span.draft_token_ids), len(token_ids)))
        tables = torch.split(torch.frombuffer(blocks, dtype=torch.int64), num_blocks)
        return cls(
            token_ids=torch.frombuffer(token_ids, dtype=torch.int64),
            positions=torch.frombuffer(positions, dtype=torch.int64),
            rope_lengths=torch.frombuffer(rope_lengths, dtype=torch.int64),
            slot_mapping=torch.frombuffer(slots, dtype=torch.int64),
            spans=tuple(AttentionSpan(*place, table) for place, table in zip(places, tables, strict=True)),
            sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
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
