"""From logits to tokens, a row at a time: truncation, the Gumbel-max trick with counter-based noise, and logprobs.

The reference in torch; `kernels/cpu_sampling.py` has the same results from compiled code. A row's result depends on
that row alone. Scores and sums are float64, and logprobs are rounded to float32 at the end, so that the order of
summation shows nowhere. Among equal logits the smaller token id is the likelier one.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels.hot_dataclass import hot_dataclass
from pdserve.kernels.logit_edits import LogitEdits, edit_row

SEED_MASK = 2**64 - 1
_TOP_P_CANDIDATES = 1024


@hot_dataclass(frozen=True, slots=True)
class RowRequest:
    """What is wanted of one row of logits: a token, or what is known of a given one.

    `num_top` is how many of the likeliest tokens are told with their logprobs; None: no logprobs at all.
    """

    temperature: float = 0.0  # 0: the likeliest
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    num_top: int | None = None
    token_id: int | None = None  # a given token, whose logprob is wanted
    edits: LogitEdits | None = None  # made before a token is sampled; logprobs are of the model's own logits


@hot_dataclass(frozen=True, slots=True)
class RowAnswer:
    """What a row gave. `token_id` is None where no token was allowed, or logits, edited ones too, were not finite."""

    token_id: int | None
    logprob: float | None = None  # of the model's own distribution, as float32 has it
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (id, logprob), the likeliest first
    is_finite: bool = True


class RowSampler(Protocol):
    """Who answers requests; `logits` [num_rows, num_ids] float32 has a row for each of them."""

    def __call__(self, logits: Tensor, requests: Sequence[RowRequest]) -> list[RowAnswer]: ...


def exponential_noise(seed: int, output_position: int, size: int) -> Tensor:  # [size] float64
    """Return one draw of the unit exponential distribution for each token id.

    Philox 4x64 (Salmon et al. 2011), keyed by the seed and counted by the position.
    """
    key = np.array([seed & SEED_MASK, 0], dtype=np.uint64)
    counter = np.array([0, output_position, 0, 0], dtype=np.uint64)  # the low word counts within the position
    uniform = np.random.Generator(np.random.Philox(key=key, counter=counter)).random(size)
    return torch.from_numpy(uniform).neg_().log1p_().neg_()


def sample_rows(logits: Tensor, requests: Sequence[RowRequest]) -> list[RowAnswer]:
    """Answer each row, as `RowSampler`."""
    if not requests:
        return []
    is_finite = logits.sum(1, dtype=torch.float64).isfinite().tolist()
    likeliest = logits.argmax(1).tolist()
    return [
        _answer(row, request, first) if finite else RowAnswer(None, is_finite=False)
        for row, request, first, finite in zip(logits, requests, likeliest, is_finite, strict=True)
    ]


def _answer(row: Tensor, request: RowRequest, likeliest: int) -> RowAnswer:
    token_id = request.token_id
    if token_id is None:
        allowed = row if request.edits is None else edit_row(row, request.edits)
        token_id = likeliest if request.edits is None else int(allowed.argmax())
        if not allowed[token_id].isfinite():
            return RowAnswer(None, is_finite=bool(allowed[token_id].isneginf()))
        if request.temperature > 0:
            scores, token_ids = _truncated(allowed, request)
            noise = exponential_noise(request.seed, request.position, row.shape[0])
            token_id = int(token_ids[(scores - noise[token_ids].log()).argmax()])
    if request.num_top is None:
        return RowAnswer(token_id)
    logprobs = row.double().log_softmax(0).float()
    _, ids = _largest(row.double(), min(request.num_top, row.shape[0]))
    top = tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return RowAnswer(token_id, float(logprobs[token_id]), top)


def _truncated(row: Tensor, request: RowRequest) -> tuple[Tensor, Tensor]:
    """Return the scaled logits (float64) and the token ids that survive top-k, top-p and min-p.

    Temperature first, then top-k, top-p, min-p, as Hugging Face orders them. The most likely token always survives.
    """
    scaled = row.double() / request.temperature
    scaled = scaled - scaled.max()
    least = math.log(request.min_p) if request.min_p > 0 else -math.inf
    has_top_k = 0 < request.top_k < row.shape[0]
    if not has_top_k and request.top_p >= 1.0:
        token_ids = ((scaled >= least) & ~scaled.isneginf()).nonzero().squeeze(1)
        return scaled[token_ids], token_ids
    best, ids = _largest(scaled, request.top_k if has_top_k else min(_TOP_P_CANDIDATES, row.shape[0]))
    weights = best.exp()
    total = weights.sum() if has_top_k else scaled.exp().sum()
    if not has_top_k and weights.sum() < request.top_p * total:
        best, ids = torch.sort(scaled, descending=True, stable=True)
        weights = best.exp()
    kept = (best >= least) & (weights > 0)
    if request.top_p < 1.0:
        kept &= weights.cumsum(0) - weights < request.top_p * total
    kept[0] = True
    return best[kept], ids[kept]


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values and their ids, in order; of equal ones the smaller id first."""
    if count == 0:
        return values[:0], torch.empty(0, dtype=torch.int64)
    border = torch.topk(values, count).values[-1]
    ids = (values >= border).nonzero().squeeze(1)
    best, order = torch.sort(values[ids], descending=True, stable=True)
    return best[:count], ids[order[:count]]
