"""Mixture of experts against one token and one expert at a time."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.experts import choose_experts, mix_experts


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(1, 1), (5, 2), (8, 8)])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_each_token_is_the_weighted_sum_of_its_experts(
    num_tokens: int, num_experts: int, num_chosen: int, is_normalized: bool
) -> None:
    rows, logits = torch.randn(num_tokens, 24), torch.randn(num_tokens, num_experts)
    gate_up, down = torch.randn(num_experts, 2 * 20, 24) * 0.2, torch.randn(num_experts, 24, 20) * 0.2

    weights, expert_ids = choose_experts(logits, num_chosen, is_normalized)
    output = mix_experts(
        rows, weights, expert_ids, [partial(_gated, *both) for both in zip(gate_up, down, strict=True)]
    )

    for token in range(num_tokens):
        expected = _one(rows[token], logits[token], gate_up, down, num_chosen, is_normalized)
        torch.testing.assert_close(output[token].double(), expected, atol=1e-5, rtol=0)


def test_normalized_weights_sum_to_one_and_others_do_not() -> None:
    logits = torch.randn(6, 8)

    assert torch.allclose(choose_experts(logits, 3, True)[0].sum(-1), torch.ones(6))
    assert (choose_experts(logits, 3, False)[0].sum(-1) < 0.999).all()


def _gated(gate_up: Tensor, down: Tensor, rows: Tensor) -> Tensor:
    gate, up = F.linear(rows, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def _one(row: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, num_chosen: int, is_normalized: bool) -> Tensor:
    odds = [torch.exp(logit) for logit in logits.double()]
    chosen = sorted(range(len(odds)), key=lambda expert: -odds[expert])[:num_chosen]
    total = sum(odds[expert] for expert in (chosen if is_normalized else range(len(odds))))
    output = torch.zeros(len(row), dtype=torch.float64)
    for expert in chosen:
        inner = gate_up[expert].double() @ row.double()
        gate, up = inner[:20], inner[20:]
        output += odds[expert] / total * (down[expert].double() @ (gate * torch.sigmoid(gate) * up))
    return output
