"""Sampling on the device answers as the reference does."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import pdserve.kernels.sampling as reference
from pdserve.kernels.logit_edits import LogitEdits, edit_row
from pdserve.kernels.sampling import RowAnswer, RowRequest
from pdserve.kernels.seen_tokens import SeenTokens
from pdserve.kernels.triton.sampling import sample_rows

pytestmark = pytest.mark.timeout(300)

_SAMPLED = RowRequest(temperature=1.0)
_REQUESTS = (
    RowRequest(),
    replace(_SAMPLED, seed=1),
    RowRequest(temperature=0.7, top_k=5, seed=2, position=1),
    RowRequest(temperature=1.5, top_p=0.9, seed=2**63 + 11, position=2),
    RowRequest(temperature=1.2, min_p=0.05, seed=2**64 - 1, position=3),
    RowRequest(temperature=0.9, top_k=40, top_p=0.5, min_p=0.02, seed=7, position=40_000),
    replace(_SAMPLED, top_k=1, seed=3),
    replace(_SAMPLED, top_p=1e-9, seed=3),
)


@pytest.mark.parametrize(
    ("vocab_size", "requests"), [(50, _REQUESTS), (130, _REQUESTS), (1300, _REQUESTS[3:4]), (1, _REQUESTS[:3])]
)
def test_answers_as_the_reference(device: torch.device, vocab_size: int, requests: Sequence[RowRequest]) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(len(requests), vocab_size) * 3

    answers = sample_rows(logits.to(device), requests)

    assert answers == reference.sample_rows(logits, requests)


def test_a_row_is_answered_the_same_alone(device: torch.device) -> None:
    torch.manual_seed(3)
    logits = torch.randn(3, 50, device=device)
    requests = [replace(_SAMPLED, seed=seed, top_p=0.8) for seed in range(3)]

    together = sample_rows(logits, requests)

    assert [sample_rows(logits[row : row + 1], requests[row : row + 1])[0] for row in range(3)] == together


def test_edits_are_made_before_the_choice(device: torch.device) -> None:
    """All in one launch: biases, penalties, bans and a list of allowed ids, each against the reference."""
    torch.manual_seed(4)
    logits = torch.randn(7, 130) * 2
    every = LogitEdits(
        biases=((5, 3.0), (9, -math.inf), (129, -1.5), (500, 2.0)),
        seen=SeenTokens((5, 40, 129, 500)).followed_by((5, 40, 5, 500)),
        repetition=1.7,
        presence=0.4,
        frequency=0.3,
    )
    edits = (
        every,
        None,
        replace(every, allowed_ids=(9, 31, 32, 63, 64, 129, 700)),
        LogitEdits(allowed_ids=(9,)),
        every,
        LogitEdits(tuple((token_id, -math.inf) for token_id in range(0, 130, 7))),
        LogitEdits(((9, -math.inf),), allowed_ids=(9,)),
    )
    requests = [RowRequest(index % 2 * 1.1, seed=index, edits=each) for index, each in enumerate(edits)]
    on_device = logits.to(device, copy=True)

    answers = sample_rows(on_device, requests)

    assert answers == reference.sample_rows(logits, requests)
    assert answers[6] == RowAnswer(None)
    edited = [row if each is None else edit_row(row, each) for row, each in zip(logits, edits, strict=True)]
    torch.testing.assert_close(on_device.cpu(), torch.stack(edited), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_told(device: torch.device, bad: float) -> None:
    logits = torch.zeros(2, 70, device=device)
    logits[1, 66] = bad

    answers = sample_rows(logits, _REQUESTS[:2])

    assert answers == reference.sample_rows(logits.cpu(), _REQUESTS[:2])
    assert [answer.is_finite for answer in answers] == [True, False]


def test_edits_that_overflow_are_told(device: torch.device) -> None:
    logits = torch.full((2, 70), 3e38, device=device)
    requests = [replace(each, edits=LogitEdits(((3, 3e38),))) for each in _REQUESTS[:2]]

    with np.errstate(over="ignore"):  # the interpreter's
        answers = sample_rows(logits, requests)

    assert answers == [RowAnswer(None, is_finite=False)] * 2


def test_no_rows(device: torch.device) -> None:
    assert sample_rows(torch.zeros(0, 10, device=device), []) == []


def test_logits_of_16_bits_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="float32"):
        sample_rows(torch.zeros(1, 10, dtype=torch.float16, device=device), _REQUESTS[:1])
