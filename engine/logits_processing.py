"""What a request may do to the model's logits before a token is sampled: biases, penalties, bans.

Order: bias, repetition penalty, presence and frequency penalties, bans. Bans come last so that nothing lifts them.

- `logit_bias` is added (OpenAI); -100 bans, since a bias alone could be outweighed.
- `repetition_penalty` r (Keskar et al. 2019, CTRL, section 4.1, as Hugging Face applies it): each token of prompt or
  output has its logit divided by r if positive, multiplied by r if not.
- `presence_penalty` and `frequency_penalty` (OpenAI): each *generated* token loses presence + frequency * count.
- `allowed_token_ids` bans everything else; `bad_words_ids` bans the token that would complete a forbidden sequence in
  the output.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.engine.sampling_params import BANNING_BIAS, SamplingParams
from pdserve.kernels.logit_edits import LogitEdits

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


def process_logits(
    row: Tensor,  # [num_token_ids] float32
    sampling: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
) -> Tensor:  # [num_token_ids] float32, the memory of `row` or new; ids that may not be sampled are -inf
    """Apply everything that the request asks for, given its own tokens alone. May change `row`."""
    logits: Row = row.numpy()
    if sampling.logit_bias:
        _add_bias(logits, sampling.logit_bias)
    if sampling.repetition_penalty != 1.0:
        _penalize_repetition(logits, sampling.repetition_penalty, prompt_token_ids, output_token_ids)
    if output_token_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        _penalize_presence(logits, sampling.presence_penalty, sampling.frequency_penalty, output_token_ids)
    for token_ids in sampling.bad_words_ids:
        *beginning, last = token_ids
        if list(output_token_ids[len(output_token_ids) - len(beginning) :]) == beginning and last < logits.size:
            logits[last] = -math.inf
    if sampling.allowed_token_ids is not None:
        logits = _only(logits, sampling.allowed_token_ids)
    return torch.from_numpy(logits)


def logit_edits(
    sampling: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    forbidden: Iterable[int],
) -> LogitEdits | None:
    """Return the same as numbers for whoever applies them beside the logits, and `forbidden` ids with it.

    None if nothing is changed.
    """
    biases = {token_id: bias if bias > BANNING_BIAS else -math.inf for token_id, bias in sampling.logit_bias}
    for token_ids in sampling.bad_words_ids:
        *beginning, last = token_ids
        if list(output_token_ids[len(output_token_ids) - len(beginning) :]) == beginning:
            biases[last] = -math.inf
    biases |= dict.fromkeys(forbidden, -math.inf)
    has_penalties = bool(sampling.presence_penalty or sampling.frequency_penalty)
    counts = Counter(output_token_ids) if has_penalties else Counter[int]()
    seen = {*prompt_token_ids, *output_token_ids} if sampling.repetition_penalty != 1.0 else set[int]()
    if not biases and not seen and not counts and sampling.allowed_token_ids is None:
        return None
    token_ids = tuple({*biases, *seen, *counts})
    return LogitEdits(
        token_ids=token_ids,
        biases=tuple(biases.get(token_id, 0.0) for token_id in token_ids),
        is_seen=tuple(token_id in seen for token_id in token_ids),
        counts=tuple(counts[token_id] for token_id in token_ids),
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        allowed_ids=sampling.allowed_token_ids,
    )


def _add_bias(logits: Row, logit_bias: Sequence[tuple[int, float]]) -> None:
    for token_id, bias in logit_bias:
        if token_id < logits.size:
            logits[token_id] = logits[token_id] + np.float32(bias) if bias > BANNING_BIAS else -math.inf


def _penalize_repetition(logits: Row, penalty: float, prompt: Sequence[int], output: Sequence[int]) -> None:
    # Of a token that comes often each place gets the same value: the factor is not applied again.
    ids = _known((*prompt, *output), logits)
    factor = np.float32(penalty)
    own = logits[ids]
    logits[ids] = np.where(own > 0, own / factor, own * factor)


def _penalize_presence(logits: Row, presence: float, frequency: float, output: Sequence[int]) -> None:
    ids, counts = np.unique(_known(output, logits), return_counts=True)
    logits[ids] -= np.float32(presence) + np.float32(frequency) * counts.astype(np.float32)


def _only(logits: Row, token_ids: Sequence[int]) -> Row:
    ids = _known(token_ids, logits)
    kept = np.full_like(logits, -math.inf)
    kept[ids] = logits[ids]
    return kept


def _known(token_ids: Sequence[int], logits: Row) -> Ids:
    ids = np.array(token_ids, dtype=np.int64)
    return ids[ids < logits.size]
