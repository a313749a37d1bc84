"""What a request does to a row of logits before a token is sampled from it, as numbers that a kernel can apply.

Per edited id, in this order: the bias is added; what was seen is divided by the repetition penalty if positive, else
multiplied by it; what was generated loses presence + frequency * count. A bias of -inf forbids, and outlasts the rest.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """The edits of one row. Ids are distinct; one beyond the row is passed over."""

    token_ids: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()  # of each id, as are the following
    is_seen: tuple[bool, ...] = ()  # in prompt or output
    counts: tuple[int, ...] = ()  # in the output
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    allowed_ids: tuple[int, ...] | None = None  # all others are forbidden


def edit_row(row: Tensor, edits: LogitEdits) -> Tensor:  # [num_ids] float32 each
    """Return the row edited: the reference."""
    inside = [index for index, token_id in enumerate(edits.token_ids) if token_id < len(row)]
    ids = torch.tensor([edits.token_ids[index] for index in inside], dtype=torch.int64)
    biases = torch.tensor([edits.biases[index] for index in inside])
    is_seen = torch.tensor([edits.is_seen[index] for index in inside], dtype=torch.bool)
    counts = torch.tensor([edits.counts[index] for index in inside], dtype=torch.int64)
    logits = row[ids] + biases
    penalized = torch.where(logits > 0, logits / edits.repetition, logits * edits.repetition)
    logits = torch.where(is_seen, penalized, logits)
    logits = torch.where(counts > 0, logits - (edits.presence + edits.frequency * counts), logits)
    edited = row.index_put((ids,), logits)
    if edits.allowed_ids is None:
        return edited
    allowed = torch.tensor([each for each in edits.allowed_ids if each < len(row)], dtype=torch.int64)
    return torch.full_like(row, -math.inf).index_put((allowed,), edited[allowed])
