"""Mixture of experts (Shazeer et al. 2017): each token runs through the few feed-forward blocks chosen for it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def choose_experts(
    router_logits: Tensor,  # [num_tokens, num_experts]
    num_chosen: int,
    is_normalized: bool,
) -> tuple[Tensor, Tensor]:  # weights [num_tokens, num_chosen] in router_logits' dtype, expert ids of the same shape
    """Return the largest of softmax(router_logits), in float32; divided by their sum if `is_normalized`."""
    probabilities = torch.softmax(router_logits.float(), dim=-1)
    weights, expert_ids = torch.topk(probabilities, num_chosen, dim=-1)
    if is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(router_logits.dtype), expert_ids


def mix_experts(
    rows: Tensor,  # [num_tokens, hidden_size]
    weights: Tensor,  # [num_tokens, num_chosen]
    expert_ids: Tensor,  # [num_tokens, num_chosen] int64
    experts: Sequence[Callable[[Tensor], Tensor]],  # [num_rows, hidden_size] -> the same shape
) -> Tensor:  # [num_tokens, hidden_size]
    """out = sum over chosen experts e of weight_e * e(x).

    A token's terms are added in the order of expert ids, whoever else is in the batch.
    """
    output = torch.zeros_like(rows)
    for expert_id in torch.unique(expert_ids).tolist():
        token_rows, places = torch.where(expert_ids == expert_id)
        term = experts[expert_id](rows[token_rows])
        output.index_add_(0, token_rows, term * weights[token_rows, places, None])
    return output
