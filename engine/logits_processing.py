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
from collections.abc import Sequence

from torch import Tensor

from pdserve.engine.sampling_params import BANNING_BIAS, SamplingParams
from pdserve.kernels.logit_edits import LogitEdits
from pdserve.kernels.seen_tokens import SeenTokens


def logit_edits(
    sampling: SamplingParams,
    seen: SeenTokens | None,
    output_token_ids: Sequence[int],
    forbidden: Sequence[int] = (),
    banned: Tensor | None = None,  # [num_token_ids] bool
) -> LogitEdits | None:
    """Return everything that the request asks for, given its own tokens alone, and what else may not be sampled.

    `seen` is read for penalties, the output for bad words; None if nothing is changed.
    """
    biases: tuple[tuple[int, float], ...] = ()
    if forbidden or sampling.logit_bias or sampling.bad_words_ids:
        biases = _biases(sampling, output_token_ids, forbidden)
    has_penalties = sampling.has_penalties
    if not biases and not has_penalties and sampling.allowed_token_ids is None and banned is None:
        return None
    return LogitEdits(
        biases=biases,
        seen=seen if has_penalties else None,
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        allowed_ids=sampling.allowed_token_ids,
        banned=banned,
    )


def _biases(
    sampling: SamplingParams, output_token_ids: Sequence[int], forbidden: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    biases = {token_id: bias if bias > BANNING_BIAS else -math.inf for token_id, bias in sampling.logit_bias}
    for token_ids in sampling.bad_words_ids:
        *beginning, last = token_ids
        if list(output_token_ids[len(output_token_ids) - len(beginning) :]) == beginning:
            biases[last] = -math.inf
    biases |= dict.fromkeys(forbidden, -math.inf)
    return tuple(biases.items())
