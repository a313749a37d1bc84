"""Penalties, biases and bans against transformers' own processors, and against their definitions where it has none."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from pdserve.engine.errors import InvalidRequest
from pdserve.engine.logits_processing import logit_edits
from pdserve.engine.sampler import Sampler
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduled_batch import ScheduledSpan
from pdserve.engine.sequence import Sequence, SequenceSpec
from pdserve.kernels.logit_edits import edit_row
from pdserve.kernels.seen_tokens import SeenTokens

_VOCAB = 50
_PROMPT = (3, 4, 4, 9)
_OUTPUT = (9, 20, 21, 20)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(_VOCAB, generator=torch.Generator().manual_seed(5)) * 3


def _processed(logits: torch.Tensor, output: tuple[int, ...] = _OUTPUT, **fields: Any) -> torch.Tensor:
    edits = logit_edits(SamplingParams(**fields), SeenTokens(_PROMPT).followed_by(output), output)
    return logits if edits is None else edit_row(logits, edits)


@pytest.mark.parametrize("penalty", [0.3, 1.7, 10.0])
def test_repetition_penalty_is_that_of_transformers(logits: torch.Tensor, penalty: float) -> None:
    tokens = torch.tensor([_PROMPT + _OUTPUT])

    expected = RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits[None].clone())[0]

    assert torch.equal(_processed(logits, repetition_penalty=penalty), expected)


def test_logit_bias_is_that_of_transformers(logits: torch.Tensor) -> None:
    bias = {7: 2.5, 8: -3.0, 49: 100.0}
    processor = SequenceBiasLogitsProcessor(sequence_bias=[[[token_id], value] for token_id, value in bias.items()])

    expected = processor(torch.tensor([_OUTPUT]), logits[None].clone())[0]

    assert torch.allclose(_processed(logits, logit_bias=bias), expected)


@pytest.mark.parametrize("output", [(), (20,), _OUTPUT, (9, 20, 21)])
def test_bad_words_are_those_of_transformers(logits: torch.Tensor, output: tuple[int, ...]) -> None:
    words = [[5], [20, 30], [20, 21, 31], [9, 20, 21, 32], [1, 2, 3, 4, 5, 6]]
    tokens = torch.tensor([output], dtype=torch.int64)

    expected = NoBadWordsLogitsProcessor(words)(tokens, logits[None].clone())[0]

    assert torch.equal(_processed(logits, output=output, bad_words_ids=words), expected)


def test_presence_and_frequency_count_generated_tokens_only(logits: torch.Tensor) -> None:
    """C053: the first token's logits are as without, however often the prompt has the token."""
    expected = logits.clone()
    expected[9] -= 0.5 + 0.25
    expected[20] -= 0.5 + 2 * 0.25
    expected[21] -= 0.5 + 0.25

    assert torch.allclose(_processed(logits, presence_penalty=0.5, frequency_penalty=0.25), expected)
    assert torch.equal(_processed(logits, output=(), presence_penalty=0.5, frequency_penalty=0.25), logits)


def test_only_allowed_ids_are_left_whatever_else_is_asked(logits: torch.Tensor) -> None:
    """C062."""
    row = _processed(
        logits, allowed_token_ids=[7, 8, 20], bad_words_ids=[[8]], logit_bias={9: 100.0, 20: -100.0}, presence_penalty=2
    )

    assert row.isfinite().nonzero().flatten().tolist() == [7]


def test_a_bias_of_minus_100_bans_at_any_temperature() -> None:
    """C059: also a token that is far ahead of all others."""
    logits = torch.zeros(_VOCAB)
    logits[7] = 500.0
    sampler = Sampler(_VOCAB, _VOCAB, frozenset())

    def tokens(temperature: float) -> set[int | None]:
        sampling = SamplingParams(seed=1, temperature=temperature, logit_bias={7: -100}, repetition_penalty=1.5)
        spans = [
            ScheduledSpan("a", 0, (1,), 1, (), sampling, position, seen=SeenTokens((7,))) for position in range(50)
        ]
        return {token.token_id for token in sampler.sample(logits.expand(50, -1), spans)}

    assert 7 not in tokens(0.0) | tokens(2.0)


def test_a_request_that_bans_every_token_fails_by_its_own_fault(logits: torch.Tensor) -> None:
    """C062: the stop id is all that is allowed, and min_tokens forbids it."""
    sampling = SamplingParams(seed=1, min_tokens=2, allowed_token_ids=[7])
    sampler = Sampler(_VOCAB, _VOCAB, frozenset({7}))

    [token] = sampler.sample(logits[None], [ScheduledSpan("a", 0, (1,), 1, (), sampling, 0)])

    assert token.token_id is None and token.is_bad_request


def test_logprobs_are_of_the_model_before_penalties(logits: torch.Tensor) -> None:
    sampling = SamplingParams(seed=1, temperature=0, logprobs=1, logit_bias={int(logits.argmax()): -100})

    [token] = Sampler(_VOCAB, _VOCAB, frozenset()).sample(
        logits[None], [ScheduledSpan("a", 0, (1,), 1, (), sampling, 0)]
    )

    assert token.top_logprobs[0][0] == int(logits.argmax()) != token.token_id
    assert token.logprob == pytest.approx(float(logits.log_softmax(0)[token.token_id]))


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("frequency_penalty", {"frequency_penalty": -2.1}),
        ("frequency_penalty", {"frequency_penalty": math.nan}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": 1e-45}),
        ("repetition_penalty", {"repetition_penalty": 11}),
        ("repetition_penalty", {"repetition_penalty": True}),
        ("logit_bias", {"logit_bias": {-1: 1.0}}),
        ("logit_bias", {"logit_bias": {5: 101}}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 1.0)}),
        ("allowed_token_ids", {"allowed_token_ids": []}),
        ("allowed_token_ids", {"allowed_token_ids": [-1]}),
        ("allowed_token_ids", {"allowed_token_ids": [1, 2, 3], "bad_words_ids": [[1], [2]], "logit_bias": {3: -100}}),
        ("bad_words", {"bad_words_ids": [[]]}),
        ("bad_words", {"bad_words_ids": [[1.5]]}),
        ("bad_words", {"bad_words_ids": [[1] * 65]}),
        ("max_tokens", {"max_tokens": 0}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    """C059, C062, C063, C082."""
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)

    assert caught.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"logit_bias": {3: 2.0, 21: -100, 44: -1.5}, "repetition_penalty": 0.6, "frequency_penalty": -0.5},
        {"bad_words_ids": [[20, 7], [5], [21, 20, 8], [21, 9, 6]]},
        {"allowed_token_ids": (3, 20, 49), "presence_penalty": 1.0},
    ],
)
def test_edits_are_these_of_float32_in_this_order(logits: torch.Tensor, fields: dict[str, Any]) -> None:
    sampling = SamplingParams(**fields)
    expected = logits.numpy().copy()
    for token_id, bias in sampling.logit_bias:
        expected[token_id] = expected[token_id] + np.float32(bias) if bias > -100 else -math.inf
    for token_id in {*_PROMPT, *_OUTPUT}:
        own, penalty = expected[token_id], np.float32(sampling.repetition_penalty)
        expected[token_id] = own / penalty if own > 0 else own * penalty
    for token_id, count in Counter(_OUTPUT).items():
        loss = np.float32(sampling.presence_penalty) + np.float32(sampling.frequency_penalty) * np.float32(count)
        expected[token_id] -= loss
    if sampling.bad_words_ids:
        expected[[7, 5, 8]] = -math.inf  # the output ends with 21, 20
    if sampling.allowed_token_ids:
        expected[[each for each in range(_VOCAB) if each not in sampling.allowed_token_ids]] = -math.inf

    assert torch.equal(_processed(logits, **fields), torch.from_numpy(expected))


def test_nothing_to_edit_is_none(logits: torch.Tensor) -> None:
    assert logit_edits(SamplingParams(), None, _OUTPUT) is None
    forbidding = logit_edits(SamplingParams(), None, _OUTPUT, forbidden=(7,))
    assert forbidding is not None and edit_row(logits, forbidding)[7] == -math.inf


def test_what_a_sequence_has_seen_is_counted_on_from_step_to_step() -> None:
    sampling = SamplingParams(repetition_penalty=1.1)
    sequence = Sequence(SequenceSpec("a", _PROMPT, sampling, output_token_ids=_OUTPUT[:1]))
    states = []
    for token_id in (*_OUTPUT[1:], 5):
        seen = sequence.count_seen()
        states.append((seen.token_ids.tolist(), seen.counts.tolist()))
        sequence.token_ids.append(token_id)

    anew = [SeenTokens(_PROMPT).followed_by(_OUTPUT[:end]) for end in range(1, 5)]
    assert states == [(each.token_ids.tolist(), each.counts.tolist()) for each in anew]
    assert states[-1] == ([3, 4, 9, 20, 21], [0, 0, 1, 2, 1])


def test_what_follows_is_counted_in_a_copy() -> None:
    seen = SeenTokens(_PROMPT)

    longer = seen.followed_by((4, 30))

    assert (seen.counts.tolist(), seen.num_generated) == ([0, 0, 0], 0)
    assert (longer.token_ids.tolist(), longer.counts.tolist()) == ([3, 4, 9, 30], [0, 1, 0, 1])
