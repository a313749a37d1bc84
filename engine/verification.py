"""Drafts verified: of several tokens computed in one step, those that sampling one at a time would have given.

The noise of a token is a function of seed and output position, so each position is sampled here as it would be alone,
from logits given the same tokens. The step goes on to a draft's own position only if the sampled token is the draft;
so what is emitted is what would have been emitted without drafts, greedy or seeded, and no distribution changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pdserve.engine.sampler import Sampler
from pdserve.engine.scheduled_batch import ScheduledBatch, ScheduledSpan
from pdserve.engine.step_output import SampledToken


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """A step as if its accepted drafts had been steps of their own: one span a token, and what was sampled after it."""

    batch: ScheduledBatch
    tokens: tuple[SampledToken | None, ...]


def sample_verified(sampler: Sampler, logits: Tensor, batch: ScheduledBatch) -> VerifiedStep:
    """Sample for every span that wants it and as far as its drafts hold.

    `logits` [num_rows, vocab_size] has, span after span, the row of its last token and of each of its drafts. What the
    request's history does to logits is computed anew at each position, from accepted tokens only.
    """
    sampling = [span for span in batch.spans if span.sampling is not None]
    if not [span for span in sampling if span.draft_token_ids]:
        sampled = iter(sampler.sample(logits, sampling) if sampling else ())
        return VerifiedStep(batch, tuple([None if span.sampling is None else next(sampled) for span in batch.spans]))
    chains: list[list[tuple[ScheduledSpan, SampledToken | None]]] = [
        [(span, None)] if span.sampling is None else [] for span in batch.spans
    ]
    open_spans = [index for index, span in enumerate(batch.spans) if span.sampling is not None]
    first_rows = _first_rows(batch, open_spans)
    num_accepted = 0
    while open_spans:
        spans = [batch.spans[index].after_drafts(num_accepted) for index in open_spans]
        rows = [first_rows[index] + num_accepted for index in open_spans]
        tokens = sampler.sample(logits if len(rows) == len(logits) else logits[rows], spans)
        for index, span, token in zip(open_spans, spans, tokens, strict=True):
            chains[index].append((span, token))
        open_spans = [
            index
            for index, token in zip(open_spans, tokens, strict=True)
            if _goes_on(token) and _draft(batch.spans[index], num_accepted) == token.token_id
        ]
        num_accepted += 1
    steps = [step for chain in chains for step in chain]
    return VerifiedStep(ScheduledBatch(tuple(span for span, _ in steps)), tuple(token for _, token in steps))


def _goes_on(token: SampledToken) -> bool:
    return token.token_id is not None and not token.completes_grammar


def _first_rows(batch: ScheduledBatch, sampling_spans: Sequence[int]) -> dict[int, int]:
    first_rows, row = {}, 0
    for index in sampling_spans:
        first_rows[index] = row
        row += 1 + len(batch.spans[index].draft_token_ids)
    return first_rows


def _draft(span: ScheduledSpan, index: int) -> int | None:
    return span.draft_token_ids[index] if index < len(span.draft_token_ids) else None
