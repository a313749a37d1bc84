"""Sampling on the device chooses the tokens that the engine's sampler chooses."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from pdserve.engine.sampling_params import SamplingParams
from pdserve.kernels.logit_edits import LogitEdits, edit_row
from pdserve.kernels.sampling import _truncated, exponential_noise
from pdserve.kernels.seen_tokens import SeenTokens
from pdserve.kernels.triton.sampling import NOT_FINITE, NOTHING_ALLOWED, EditedRows, SamplingRows, sample


@dataclass(frozen=True)
class _Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


_ROWS = (
    _Row(temperature=0.0),
    _Row(seed=1),
    _Row(temperature=0.7, top_k=5, seed=2, position=1),
    _Row(temperature=1.5, top_p=0.9, seed=2**63 + 11, position=2),
    _Row(temperature=1.2, min_p=0.05, seed=2**64 - 1, position=3),
    _Row(temperature=0.9, top_k=40, top_p=0.5, min_p=0.02, seed=7, position=40_000),
    _Row(top_k=1, seed=3),
    _Row(top_p=1e-9, seed=3),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("vocab_size", "rows"), [(50, _ROWS), (130, _ROWS), (1300, _ROWS[3:4])])
def test_chooses_what_the_sampler_chooses(device: torch.device, vocab_size: int, rows: tuple[_Row, ...]) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(len(rows), vocab_size) * 3
    logits[:, ::7] = -math.inf

    chosen = sample(logits.to(device), _sampling_rows(rows, device))

    assert chosen.tolist() == [_expected(logits[index], row) for index, row in enumerate(rows)]


def test_a_row_chooses_the_same_alone(device: torch.device) -> None:
    torch.manual_seed(3)
    logits = torch.randn(3, 50, device=device)
    rows = tuple(_Row(seed=seed, top_p=0.8) for seed in range(3))

    together = sample(logits, _sampling_rows(rows, device))

    alone = [sample(logits[index : index + 1], _sampling_rows(rows[index : index + 1], device)) for index in range(3)]
    assert torch.equal(torch.cat(alone), together)


def test_edits_are_made_before_the_choice(device: torch.device) -> None:
    """All in one launch: biases, penalties, bans and a list of allowed ids, each against the reference."""
    torch.manual_seed(4)
    logits = torch.randn(6, 130) * 2
    every = LogitEdits(
        biases=((5, 3.0), (9, -math.inf), (129, -1.5), (500, 2.0)),
        seen=SeenTokens((5, 40, 129, 500)).followed_by((5, 40, 5, 500)),
        repetition=1.7,
        presence=0.4,
        frequency=0.3,
    )
    edits = [
        every,
        None,
        replace(every, allowed_ids=(9, 31, 32, 63, 64, 129, 700)),
        LogitEdits(allowed_ids=(9,)),
        every,
    ]
    nothing = LogitEdits(((9, -math.inf),), allowed_ids=(9,))
    rows = tuple(_Row(seed=index, temperature=index % 2 * 1.1) for index in range(6))
    on_device = logits.to(device, copy=True)

    chosen = sample(on_device, _sampling_rows(rows, device), EditedRows.of([*edits, nothing], 130, device))

    expected = [
        row if each is None else edit_row(row, each) for row, each in zip(logits, [*edits, nothing], strict=True)
    ]
    torch.testing.assert_close(on_device.cpu(), torch.stack(expected), atol=1e-6, rtol=1e-6)
    assert chosen[:5].tolist() == [_expected(*pair) for pair in zip(expected[:5], rows[:5], strict=True)]
    assert int(chosen[5]) == NOTHING_ALLOWED


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_told(device: torch.device, bad: float) -> None:
    logits = torch.zeros(2, 70, device=device)
    logits[1, 66] = bad

    chosen = sample(logits, _sampling_rows(_ROWS[:2], device))

    assert chosen.tolist()[1] == NOT_FINITE != chosen.tolist()[0]


def test_edits_that_overflow_are_told(device: torch.device) -> None:
    edits = [LogitEdits(((3, 3e38),))] * 2
    logits = torch.full((2, 70), 3e38, device=device)

    with np.errstate(over="ignore"):  # the interpreter's
        chosen = sample(logits, _sampling_rows(_ROWS[:2], device), EditedRows.of(edits, 70, device))

    assert chosen.tolist() == [NOT_FINITE] * 2


def test_no_rows(device: torch.device) -> None:
    assert sample(torch.zeros(0, 10, device=device), _sampling_rows((), device)).shape == (0,)


def test_logits_of_16_bits_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="float32"):
        sample(torch.zeros(1, 10, dtype=torch.float16, device=device), _sampling_rows(_ROWS[:1], device))


def _expected(logits: torch.Tensor, row: _Row) -> int:
    if row.temperature == 0.0:
        return int(logits.argmax())
    sampling = SamplingParams(temperature=row.temperature, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p)
    weights, token_ids = _truncated(logits, sampling)
    noise = exponential_noise(row.seed, row.position, len(logits))
    return int(token_ids[(weights - noise[token_ids].log()).argmax()])


def _sampling_rows(rows: tuple[_Row, ...], device: torch.device) -> SamplingRows:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=device)

    seeds = torch.tensor([row.seed for row in rows], dtype=torch.uint64).view(torch.int64).to(device)
    return SamplingRows(
        temperatures=column("temperature", torch.float64),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float64),
        min_p=column("min_p", torch.float64),
        seeds=seeds,
        positions=column("position", torch.int64),
    )
