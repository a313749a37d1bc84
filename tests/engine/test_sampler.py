"""Sampler: truncation as Hugging Face defines it, random numbers as a function of seed and position alone."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pdserve.engine.sampler import Sampler, exponential_noise
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduled_batch import ScheduledSpan
from pdserve.engine.step_output import SampledToken

_VOCAB = 3000
_EOS = frozenset({7, 11})


def _span(sampling: SamplingParams, position: int = 0) -> ScheduledSpan:
    return ScheduledSpan("a", 0, (1,), 1, (), sampling, position)


def _sample(logits: torch.Tensor, sampling: SamplingParams, position: int = 0) -> SampledToken:
    sampler = Sampler(_VOCAB, _VOCAB, _EOS)
    return sampler.sample(logits[None], [_span(sampling, position)])[0]


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(_VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def test_noise_depends_on_seed_and_position_only() -> None:
    first = {
        (seed, position): float(exponential_noise(seed, position, 4)[0])
        for seed in (-5, 0, 2**63 - 1)
        for position in range(50)
    }

    assert len(set(first.values())) == len(first)
    assert torch.equal(exponential_noise(0, 7, 4), exponential_noise(0, 7, 9)[:4])


def test_noise_of_one_position_is_not_that_of_the_next_shifted() -> None:
    assert not set(exponential_noise(1, 0, 5000).tolist()) & set(exponential_noise(1, 1, 5000).tolist())


def test_noise_never_changes() -> None:
    """Golden values: a change would make every seeded answer of every user different."""
    assert exponential_noise(42, 3, 3).tolist() == pytest.approx(
        [0.3480067693567744, 0.00810647007930256, 0.7234456918297252], rel=1e-12
    )


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=1, temperature=0.7),
        SamplingParams(seed=1, temperature=1.5, top_k=5),
        SamplingParams(seed=1, temperature=1.0, top_p=0.3),
        SamplingParams(seed=1, temperature=2.0, top_p=0.999),
        SamplingParams(seed=1, temperature=1.0, min_p=0.2),
        SamplingParams(seed=1, temperature=0.9, top_k=50, top_p=0.8, min_p=0.05),
        SamplingParams(seed=1, temperature=1.0, top_k=-1),
    ],
)
def test_distribution_is_that_of_transformers(logits: torch.Tensor, sampling: SamplingParams) -> None:
    """A chi-square test over the tokens that are expected often enough."""
    expected = _transformers_probabilities(logits, sampling)
    counts: Counter[int] = Counter()
    num_draws = 1500

    for position in range(num_draws):
        token_id = _sample(logits, sampling, position).token_id
        assert token_id is not None
        counts[token_id] += 1

    assert all(expected[token_id] > 0 for token_id in counts)
    statistic = sum(
        (counts[i] - num_draws * p) ** 2 / (num_draws * p) for i, p in enumerate(expected) if p > 5 / num_draws
    )
    degrees = sum(1 for p in expected if p > 5 / num_draws)
    assert statistic < degrees + 5 * math.sqrt(2 * degrees) + 5


def _transformers_probabilities(logits: torch.Tensor, sampling: SamplingParams) -> list[float]:
    scores = logits[None]
    ids = torch.zeros(1, 1, dtype=torch.int64)
    warpers = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    for warper in warpers:
        scores = warper(ids, scores)
    probabilities: list[float] = scores[0].double().softmax(0).tolist()
    return probabilities


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=1, temperature=0.0),
        SamplingParams(seed=1, temperature=1e-8),
        SamplingParams(seed=1, temperature=1e-4),
        SamplingParams(seed=1, top_p=1e-4),
        SamplingParams(seed=1, top_p=0.0),
        SamplingParams(seed=1, top_k=1),
        SamplingParams(seed=1, min_p=1.0),
        SamplingParams(seed=1, temperature=1e-4, top_p=1e-4),
    ],
)
def test_vanishing_randomness_is_greedy(logits: torch.Tensor, sampling: SamplingParams) -> None:
    """C048."""
    logits = logits * 50

    assert {_sample(logits, sampling, position).token_id for position in range(20)} == {int(logits.argmax())}


def test_result_does_not_depend_on_the_other_rows(logits: torch.Tensor) -> None:
    """C051."""
    sampler = Sampler(_VOCAB, _VOCAB, _EOS)
    params = [SamplingParams(seed=seed, temperature=1.3, top_p=0.9) for seed in range(8)]
    rows = torch.stack([logits.roll(shift) for shift in range(8)])

    together = sampler.sample(rows, [_span(sampling, 5) for sampling in params])

    alone = [sampler.sample(rows[i : i + 1], [_span(params[i], 5)])[0] for i in range(8)]
    assert together == alone


def test_ids_beyond_the_tokenizer_are_never_sampled(logits: torch.Tensor) -> None:
    """C149: a padded vocabulary."""
    logits[2900:] = 100.0
    sampler = Sampler(_VOCAB, 2900, _EOS)

    for sampling in (SamplingParams(seed=1, temperature=0), SamplingParams(seed=1, temperature=2.0)):
        token_id = sampler.sample(logits[None], [_span(sampling)])[0].token_id
        assert token_id is not None and token_id < 2900


def test_stop_ids_cannot_be_sampled_before_min_tokens(logits: torch.Tensor) -> None:
    """C043: every id of the EOS list and the user's own stop ids."""
    logits[[7, 11, 13]] = 100.0
    sampling = SamplingParams(seed=1, temperature=0, min_tokens=2, stop_token_ids=(13,))

    early = {_sample(logits, sampling, position).token_id for position in (0, 1)}

    assert not early & {7, 11, 13}
    assert _sample(logits, sampling, 2).token_id in (7, 11, 13)


def test_what_is_done_to_a_row_stays_in_its_step(logits: torch.Tensor) -> None:
    best, second = logits.topk(2).indices.tolist()
    edited = SamplingParams(seed=1, temperature=0, logit_bias={best: -100}, repetition_penalty=1.1)
    lengthened = SamplingParams(seed=1, temperature=0, logit_bias={7: -5.0})
    sampler, before = Sampler(_VOCAB, _VOCAB, _EOS), logits.clone()

    tokens = [sampler.sample(logits.expand(2, -1), [_span(each), _span(each)]) for each in (edited, lengthened)]

    assert [[token.token_id for token in step] for step in tokens] == [[second] * 2, [best] * 2]
    assert torch.equal(logits, before)


def test_logits_that_are_not_finite_fail_that_row_only(logits: torch.Tensor) -> None:
    """C136: never a stream of token 0."""
    broken = logits.clone()
    broken[5] = math.nan
    sampler = Sampler(_VOCAB, _VOCAB, _EOS)
    sampling = SamplingParams(seed=1, temperature=0)

    failed, fine = sampler.sample(torch.stack([broken, logits]), [_span(sampling), _span(sampling)])

    assert failed.token_id is None and failed.failure is not None
    assert fine.token_id == int(logits.argmax())


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_logprobs_are_of_the_models_own_distribution(logits: torch.Tensor, temperature: float) -> None:
    """C072, C073: k distinct ids in order, the sampled token's own value beside them."""
    sampling = SamplingParams(seed=1, temperature=temperature, logprobs=3)
    expected = logits.log_softmax(0)

    token = _sample(logits, sampling)

    assert token.token_id is not None and token.logprob is not None
    assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-5)
    assert [token_id for token_id, _ in token.top_logprobs] == expected.topk(3).indices.tolist()
    assert replace(token, top_logprobs=()).logprob == token.logprob


def test_zero_logprobs_gives_the_sampled_one_only(logits: torch.Tensor) -> None:
    """C081."""
    token = _sample(logits, SamplingParams(seed=1, temperature=0, logprobs=0))

    assert token.logprob is not None and token.top_logprobs == ()
