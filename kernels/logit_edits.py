"""What a request does to a row of logits before a token is sampled from it, as numbers that a kernel can apply.

In this order: the bias of an id is added; what was seen is divided by the repetition penalty if positive, else
multiplied by it; what was generated loses presence + frequency * count. All of it in float32. A bias of -inf forbids,
and outlasts the rest. What is not allowed, or banned, becomes -inf.
"""

import math

import torch
from torch import Tensor

from pdserve.kernels.hot_dataclass import hot_dataclass
from pdserve.kernels.seen_tokens import SeenTokens


@hot_dataclass(frozen=True, slots=True)
class LogitEdits:
    """The edits of one row. An id beyond the row is passed over."""

    biases: tuple[tuple[int, float], ...] = ()  # (id, what is added), each id once
    seen: SeenTokens | None = None  # what penalties are of
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    allowed_ids: tuple[int, ...] | None = None  # all others are forbidden
    banned: Tensor | None = None  # [num_ids] bool


def edit_row(row: Tensor, edits: LogitEdits) -> Tensor:  # [num_ids] float32 each
    """Return the row edited: the reference."""
    edited = row.clone()
    biases = {token_id: bias for token_id, bias in edits.biases if token_id < len(row)}
    if biases:
        ids = torch.tensor(list(biases))
        edited[ids] += torch.tensor(list(biases.values()), dtype=torch.float32)
    if edits.seen is not None and edits.seen.token_ids:
        ids, counts = torch.tensor(edits.seen.token_ids.tolist()), torch.tensor(edits.seen.counts.tolist())
        ids, counts = ids[ids < len(row)], counts[ids < len(row)].float()
        logits = edited[ids]
        logits = torch.where(logits > 0, logits / edits.repetition, logits * edits.repetition)
        edited[ids] = torch.where(counts > 0, logits - (counts * edits.frequency + edits.presence), logits)
    if edits.allowed_ids is not None:
        allowed = torch.tensor([each for each in edits.allowed_ids if each < len(row)], dtype=torch.int64)
        edited = torch.full_like(row, -math.inf).index_put((allowed,), edited[allowed])
    return edited if edits.banned is None else edited.masked_fill(edits.banned, -math.inf)
