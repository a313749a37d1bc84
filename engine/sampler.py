"""From logits to tokens for the spans of a batch: what each request asks of its row, and what the row says.

The noise of a token id is a function of (seed, output position, token id) alone. Whoever computes the token, in
whatever batch, sees the same noise.

Why argmax(logit + Gumbel noise) and not one random number against the cumulative distribution: both sample exactly,
but logits computed in another batch shape differ in their last bits. A cumulative sum over a large vocabulary has a
border within those bits of almost any number (measured on the demo model in float32 at temperature 1: one token in
250 changed between batch shapes), while the two best scores are rarely that close (none changed in 40 such runs).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.engine.errors import GrammarFailed
from pdserve.engine.grammar_masks import GrammarMasks
from pdserve.engine.logits_processing import logit_edits
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduled_batch import ScheduledSpan
from pdserve.engine.step_output import SampledToken, TokenScore
from pdserve.kernels.logit_edits import LogitEdits, edit_row
from pdserve.kernels.sampling import RowAnswer, RowRequest, RowSampler, sample_rows
from pdserve.kernels.sampling import exponential_noise as exponential_noise

_NOT_FINITE = SampledToken(None, failure="the model produced logits that are not finite")
_NOTHING_ALLOWED = SampledToken(
    None,
    failure="what the request bans and min_tokens leave no token that could be sampled",
    is_bad_request=True,
)
_LIKELIEST = RowRequest()


class Sampler:
    """Samples one token for each row; ids outside the tokenizer or forbidden by min_tokens are never sampled.

    `grammars` has begun with the masks of the rows of structured answers; a sampler of drafts has none: the grammar is
    held against them when they are verified. `answer` does the arithmetic of all rows at once, and what requests do to
    logits with it.
    """

    def __init__(
        self,
        vocab_size: int,
        num_token_ids: int,
        eos_ids: frozenset[int],
        grammars: GrammarMasks | None = None,
        answer: RowSampler = sample_rows,
    ) -> None:
        self._grammars = grammars
        self._answer = answer
        self._num_token_ids = min(num_token_ids, vocab_size)
        self._has_other_ids = self._num_token_ids < vocab_size
        self._eos_ids = tuple(sorted(eos_ids))

    def sample(self, logits: Tensor, spans: Sequence[ScheduledSpan]) -> list[SampledToken]:
        """Sample for the spans that want it; row i of `logits` [num_rows, vocab_size] belongs to spans[i]."""
        logits = self._of_tokens(logits)
        known = self._beams(logits, spans)
        requests = []
        for index, span in enumerate(spans):
            try:
                requests.append(_LIKELIEST if index in known else self._request(logits, index, span))
            except GrammarFailed as error:
                known[index] = SampledToken(None, failure=f"structured output: {error}", is_bad_request=True)
                requests.append(_LIKELIEST)
        sampled = [_token(answer) for answer in self._answer(logits, requests)]
        for index, token in known.items():
            sampled[index] = token
        return sampled if self._grammars is None else self._grammars.accept(spans, sampled)

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> list[TokenScore]:
        """Return how likely each given token was; row i of `logits` [num_rows, vocab_size] predicts token_ids[i]."""
        requests = [RowRequest(token_id=token_id, num_top=num_top) for token_id in token_ids.tolist()]
        answers = self._answer(self._of_tokens(logits), requests)
        return [TokenScore(math.nan if each.logprob is None else each.logprob, each.top_logprobs) for each in answers]

    def _of_tokens(self, logits: Tensor) -> Tensor:
        return logits[:, : self._num_token_ids] if self._has_other_ids else logits  # a view costs as much as a row

    def _request(self, logits: Tensor, index: int, span: ScheduledSpan) -> RowRequest:
        sampling = span.sampling
        assert sampling is not None and sampling.seed is not None
        edits = self._edits(logits, index, span) if _may_edit(sampling, span) else None
        if sampling.is_greedy:
            if edits is None and sampling.logprobs is None:
                return _LIKELIEST
            return RowRequest(num_top=sampling.logprobs, edits=edits)
        return RowRequest(
            temperature=sampling.temperature,
            top_k=max(0, sampling.top_k),
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            position=span.output_position,
            num_top=sampling.logprobs,
            edits=edits,
        )

    def _edits(self, logits: Tensor, index: int, span: ScheduledSpan) -> LogitEdits | None:
        sampling = span.sampling
        assert sampling is not None
        banned = self._banned_by_grammar(sampling, span)
        is_too_short = span.output_position < sampling.min_tokens
        forbidden = (*sampling.stop_token_ids, *self._eos_ids) if is_too_short else ()
        edits = logit_edits(sampling, span.seen, span.output_history, forbidden, banned)
        if banned is None or edits is None or not is_too_short:
            return edits
        # A structured answer that is whole ends before min_tokens: nothing else may follow.
        is_whole = bool(edit_row(logits[index].cpu(), edits).max().isneginf())
        return logit_edits(sampling, span.seen, span.output_history, banned=banned) if is_whole else edits

    def _banned_by_grammar(self, sampling: SamplingParams, span: ScheduledSpan) -> Tensor | None:
        if sampling.structured_outputs is None or self._grammars is None:
            return None
        return self._grammars.banned(span)

    def _beams(self, logits: Tensor, spans: Sequence[ScheduledSpan]) -> dict[int, SampledToken]:
        """Return, for the rows of beams, no token but the likeliest ones: whoever searches decides."""
        beams = [index for index, span in enumerate(spans) if span.num_candidates]
        if not beams:
            return {}
        samplings = [spans[index].sampling for index in beams]
        divisors = torch.tensor([(sampling.temperature if sampling else 0.0) or 1.0 for sampling in samplings])
        requests = [RowRequest(token_id=0, num_top=spans[index].num_candidates) for index in beams]
        answers = self._answer(logits[beams].cpu() / divisors[:, None], requests)
        tokens = [
            SampledToken(None, top_logprobs=each.top_logprobs) if each.is_finite else _NOT_FINITE for each in answers
        ]
        return dict(zip(beams, tokens, strict=True))


def _may_edit(sampling: SamplingParams, span: ScheduledSpan) -> bool:
    """Whether a request does anything to its logits; most do not, and need not be looked at closely."""
    return bool(
        span.seen is not None
        or span.output_position < sampling.min_tokens
        or sampling.logit_bias
        or sampling.bad_words_ids
        or sampling.structured_outputs is not None
        or sampling.allowed_token_ids is not None
    )


def _token(answer: RowAnswer) -> SampledToken:
    if answer.token_id is not None:
        return SampledToken(answer.token_id, answer.logprob, answer.top_logprobs)
    return _NOTHING_ALLOWED if answer.is_finite else _NOT_FINITE
