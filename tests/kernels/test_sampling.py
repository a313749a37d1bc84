"""Compiled sampling against the torch reference, for every build that runs here."""

import importlib.machinery
from collections.abc import Iterator
from ctypes import CDLL
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.kernels import cpu
from pdserve.kernels.cpu import CpuKernels, runs_here
from pdserve.kernels.cpu_sampling import CompiledRowSampler
from pdserve.kernels.logit_edits import LogitEdits, edit_row
from pdserve.kernels.sampling import RowAnswer, RowRequest, RowSampler, exponential_noise, sample_rows
from pdserve.kernels.seen_tokens import SeenTokens

_SIZES = (1, 7, 63, 64, 65, 1000, 3001)
_RANDOM = (
    {},
    {"temperature": 0.01},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 60},
    {"top_k": 2999},
    {"top_k": 10_000},
    {"top_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 0.9999, "temperature": 2.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
    {"top_p": 0.95, "min_p": 0.01},
    {"min_p": 1e-9},
    {"top_p": 0.95, "temperature": 2.0, "min_p": 1e-3},
)


def _builds() -> Iterator[str]:
    for name in ("avx512bf16", "avx512vnni", "avx512", "avx2", "generic"):
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            if Path(cpu.__file__).with_name(f"cpu_{name}{suffix}").exists():
                yield f"cpu_{name}{suffix}"


@pytest.fixture(scope="module", params=list(_builds()) or [None])
def compiled(request: pytest.FixtureRequest) -> RowSampler:
    if request.param is None:
        pytest.skip("the CPU kernels are not built here")
    library = CDLL(str(Path(cpu.__file__).with_name(request.param)))
    if not runs_here(library):
        pytest.skip("this processor has not the instructions of this build")
    return CompiledRowSampler(CpuKernels(library, num_threads=2))


def _logits(num_rows: int, size: int, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size)) * scale


@pytest.mark.parametrize("size", _SIZES)
def test_tokens_are_those_of_the_reference(compiled: RowSampler, size: int) -> None:
    requests = [RowRequest()]
    for index, fields in enumerate(_RANDOM):
        requests += [
            replace(RowRequest(temperature=0.9, seed=-3 + index, position=place), **fields) for place in range(4)
        ]
    logits = _logits(len(requests), size)

    assert compiled(logits, requests) == sample_rows(logits, requests)


def test_thousands_of_draws_are_those_of_the_reference(compiled: RowSampler) -> None:
    """A flat and a steep row: few and many candidates for the largest score."""
    for scale in (0.1, 3.0):
        logits = _logits(1, 500, scale).expand(1500, -1)
        requests = [RowRequest(temperature=1.0, seed=2**63 - 1, position=place) for place in range(1500)]

        ours, theirs = compiled(logits, requests), sample_rows(logits, requests)

        assert [answer.token_id for answer in ours] == [answer.token_id for answer in theirs]
        assert len({answer.token_id for answer in ours}) > 30


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.5, 4.0, 30.0])
def test_a_nucleus_is_that_of_the_reference_however_wide_it_is(compiled: RowSampler, scale: float) -> None:
    """Of few ids, of nearly all, and with many of equal logits at its border."""
    logits = torch.cat([_logits(1, 20_000, scale), (_logits(1, 20_000, scale) * 2).round() / 2])
    requests = [
        RowRequest(temperature=temperature, top_p=top_p, min_p=min_p, seed=7, position=place)
        for temperature, top_p, min_p in [(0.3, 0.5, 0.0), (1.0, 0.9, 0.0), (2.0, 0.999, 0.0), (1.0, 0.02, 1e-3)]
        for place in range(6)
    ]
    rows = logits.repeat_interleave(len(requests), dim=0)

    assert compiled(rows, 2 * requests) == sample_rows(rows, 2 * requests)


def test_noise_is_that_of_numpy(compiled: RowSampler) -> None:
    """Of equal logits the least noise wins."""
    for seed, position in ((0, 0), (-1, 5), (2**63 - 1, 2**31), (-(2**63), 1)):
        request = RowRequest(temperature=1.0, seed=seed, position=position)

        [answer] = compiled(torch.zeros(1, 4099), [request])

        assert answer.token_id == int(exponential_noise(seed, position, 4099).argmin())


@pytest.mark.parametrize("size", _SIZES)
def test_logprobs_are_those_of_the_reference(compiled: RowSampler, size: int) -> None:
    requests = [
        RowRequest(num_top=count, token_id=given) for count in (0, 1, 5, 20, 4000) for given in (None, size // 2)
    ]
    logits = _logits(len(requests), size)

    for ours, theirs in zip(compiled(logits, requests), sample_rows(logits, requests), strict=True):
        assert ours.token_id == theirs.token_id
        assert [token_id for token_id, _ in ours.top_logprobs] == [token_id for token_id, _ in theirs.top_logprobs]
        np.testing.assert_allclose(
            [ours.logprob, *(logprob for _, logprob in ours.top_logprobs)],
            [theirs.logprob, *(logprob for _, logprob in theirs.top_logprobs)],
            rtol=1.3e-7,
            atol=1e-12,
        )


def test_equal_logits_are_in_the_order_of_their_ids(compiled: RowSampler) -> None:
    logits = torch.zeros(1, 300)
    requests = [
        RowRequest(num_top=20),
        RowRequest(temperature=1.0, top_k=3, seed=4, num_top=2),
        RowRequest(temperature=1.0, top_p=0.05, seed=4),
    ]

    answers = compiled(logits.expand(3, -1), requests)

    assert answers == sample_rows(logits.expand(3, -1), requests)
    assert [token_id for token_id, _ in answers[0].top_logprobs] == list(range(20))
    assert answers[0].token_id == 0
    assert answers[1].token_id is not None and answers[1].token_id < 3
    assert answers[2].token_id is not None and answers[2].token_id < 15


def test_what_is_forbidden_is_never_sampled_and_logprobs_stay_the_models(compiled: RowSampler) -> None:
    logits = _logits(1, 1000)
    edits = LogitEdits(banned=torch.arange(1000) % 7 != 3)
    for fields in _RANDOM:
        requests = [replace(RowRequest(temperature=1.5, position=place, edits=edits), **fields) for place in range(9)]
        requests = [replace(each, num_top=2) for each in requests]

        answers = compiled(logits.expand(9, -1), requests)

        assert all(answer.token_id is not None and answer.token_id % 7 == 3 for answer in answers)
        assert answers == sample_rows(logits.expand(9, -1), requests)
        assert {answer.top_logprobs[0][0] for answer in answers} == {int(logits.argmax())}


def test_rows_without_an_answer_say_why(compiled: RowSampler) -> None:
    """What is wrong with one row is not seen in another."""
    logits = _logits(6, 200)
    logits[1, 7], logits[2, 199], logits[3, 0] = torch.nan, torch.inf, -torch.inf
    nothing = LogitEdits(banned=torch.ones(200, dtype=torch.bool))
    requests = [RowRequest(temperature=1.0) for _ in range(5)] + [RowRequest(temperature=1.0, edits=nothing)]

    answers = compiled(logits, requests)

    assert [answer.token_id is None for answer in answers] == [False, True, True, True, False, True]
    assert [answer.is_finite for answer in answers] == [True, False, False, False, True, True]
    assert answers == sample_rows(logits, requests)


@pytest.mark.parametrize(
    "wanted",
    [
        RowRequest(),
        RowRequest(temperature=1.0),
        RowRequest(temperature=1.0, top_p=0.9),
        RowRequest(temperature=1.0, top_k=5),
        RowRequest(temperature=1.0, min_p=0.1),
    ],
)
def test_edits_that_overflow_are_told_and_not_searched_for_ever(compiled: RowSampler, wanted: RowRequest) -> None:
    logits = _logits(7, 200)[:1]
    wanted = replace(wanted, edits=LogitEdits(biases=((3, torch.inf), (150, torch.inf))))

    answers = compiled(logits, [wanted])

    assert answers == sample_rows(logits, [wanted]) == [RowAnswer(None, is_finite=False)]


def test_a_row_is_answered_alike_alone_and_among_others_however_it_lies(compiled: RowSampler) -> None:
    requests = [replace(RowRequest(temperature=1.1, seed=9, num_top=3), **fields) for fields in _RANDOM]
    padded = _logits(len(requests), 1300)
    logits = padded[:, :1234]  # rows that are not next to each other

    together = compiled(logits, requests)

    for index, request in enumerate(requests):
        assert compiled(logits[index : index + 1].clone(), [request]) == [together[index]]
    assert compiled(logits[:0], []) == []


def _random_edits(draw: np.random.Generator, size: int) -> LogitEdits:
    """Few or many of each kind, ids beyond the row among them."""
    some = size if draw.random() < 0.2 else min(size, 20)
    biased = draw.choice(size + 5, int(draw.integers(some + 1)), replace=False).tolist()
    biases = np.where(draw.random(len(biased)) < 0.3, -np.inf, draw.normal(0, 3, len(biased))).tolist()
    seen = SeenTokens(draw.integers(size + 5, size=int(draw.integers(2 * some))).tolist())
    allowed = draw.integers(size + 5, size=int(draw.integers(1, some + 2))).tolist()
    return LogitEdits(
        biases=tuple(zip(biased, biases, strict=True)),
        seen=seen.followed_by(draw.integers(size + 5, size=some).tolist()) if draw.random() < 0.7 else None,
        repetition=float(draw.choice([1.0, 0.6, 1.1, 10.0])),
        presence=float(draw.choice([0.0, 0.7, -2.0])),
        frequency=float(draw.choice([0.0, 0.3, -1.1])),
        allowed_ids=tuple(allowed) if draw.random() < 0.3 else None,
        banned=torch.from_numpy(draw.random(size) < 0.5) if draw.random() < 0.3 else None,
    )


@pytest.mark.parametrize("size", _SIZES)
def test_edited_rows_are_answered_as_by_the_reference_and_stay_what_they_were(compiled: RowSampler, size: int) -> None:
    draw = np.random.default_rng(size)
    logits = _logits(8 * len(_RANDOM), size)
    before = logits.clone()
    requests = [
        replace(
            RowRequest(temperature=0.9, seed=index, position=index, edits=_random_edits(draw, size)),
            **_RANDOM[index % len(_RANDOM)],
        )
        for index in range(len(logits))
    ]

    assert compiled(logits, requests) == sample_rows(logits, requests)
    greedy = [replace(each, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0) for each in requests]
    assert compiled(logits, greedy) == sample_rows(logits, greedy)
    told = [replace(each, num_top=3) for each in requests]
    for ours, theirs in zip(compiled(logits, told), sample_rows(logits, told), strict=True):
        assert ours.token_id == theirs.token_id
        assert [token_id for token_id, _ in ours.top_logprobs] == [token_id for token_id, _ in theirs.top_logprobs]
    assert torch.equal(logits, before)


def test_an_edited_logit_is_that_of_the_reference_to_the_last_bit(compiled: RowSampler) -> None:
    """Of two ids, the second with the value that the first is to get, the smaller wins: in either order."""
    draw = np.random.default_rng(3)
    for _ in range(300):
        edited_id, other_id = draw.choice(200, 2, replace=False).tolist()
        edits = LogitEdits(
            biases=((edited_id, float(draw.normal(0, 3))),),
            seen=SeenTokens((edited_id,)).followed_by([edited_id] * int(draw.integers(4))),
            repetition=float(draw.uniform(0.5, 2)),
            presence=float(draw.normal()),
            frequency=float(draw.normal()),
        )
        logits = torch.full((1, 200), -1e4)
        logits[0, edited_id] = float(draw.normal(0, 5))
        logits[0, other_id] = edit_row(logits[0], edits)[edited_id]

        [answer] = compiled(logits, [RowRequest(edits=edits)])

        assert answer.token_id == min(edited_id, other_id)


def test_the_likeliest_of_an_edited_row_is_found_whatever_the_edits_raise_or_lower(compiled: RowSampler) -> None:
    """A few edits of a long row, most of them of what is largest near by."""
    draw = np.random.default_rng(5)
    logits = _logits(200, 5000)
    requests = []
    for row in logits:
        largest = [64 * group + int(row[64 * group : 64 * group + 64].argmax()) for group in draw.integers(79, size=20)]
        ids = dict.fromkeys([int(row.argmax()), *row.topk(5).indices.tolist(), *largest, *draw.integers(5000, size=9)])
        biased = [int(token_id) for token_id in ids if draw.random() < 0.5]
        edits = LogitEdits(
            biases=tuple((token_id, float(draw.choice([-np.inf, -3.0, 0.0, 3.0, 9.0]))) for token_id in biased),
            seen=SeenTokens([int(token_id) for token_id in ids if draw.random() < 0.5]),
            repetition=float(draw.choice([0.6, 1.1, 10.0])),
        )
        requests.append(RowRequest(edits=edits))
    nuclei = [replace(each, temperature=1.0, top_p=0.9) for each in requests]

    assert compiled(logits, requests) == sample_rows(logits, requests)
    assert compiled(logits, nuclei) == sample_rows(logits, nuclei)


def test_rows_that_share_their_memory_are_edited_apart(compiled: RowSampler) -> None:
    logits = _logits(1, 1000).expand(128, -1)
    requests = [RowRequest(edits=LogitEdits(allowed_ids=(index,), biases=((index, 1.0),))) for index in range(64)]
    requests += [RowRequest(edits=LogitEdits(biases=((index, 100.0),))) for index in range(64)]

    answers = compiled(logits, requests)

    assert [answer.token_id for answer in answers] == [*range(64), *range(64)]
