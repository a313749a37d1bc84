"""One step's decision in Python ints: which tokens of which sequences are computed, and what is wanted of them."""

from dataclasses import dataclass, replace

from pdserve.engine.block_pool import BlockId
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import Sequence
from pdserve.kernels.hot_dataclass import hot_dataclass
from pdserve.kernels.seen_tokens import SeenTokens


@hot_dataclass(frozen=True, slots=True)
class ScheduledSpan:
    """Tokens [start, start + len(token_ids)) of a sequence, to be computed in this step.

    `draft_token_ids` are guesses at the tokens that follow, computed in the same step to be verified.
    `output_history` and `seen` are there only if the sampling needs them, so that others pay nothing for their length;
    `seen` is the sequence's own and counts on with its next span. Where
    prompt logprobs are wanted, `scored_token_ids` are the prompt tokens that follow the first tokens of this span.
    A span without tokens samples once more from the last row of the span before it: the first token of a branch.
    """

    seq_id: str
    start: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    block_table: tuple[BlockId, ...]
    sampling: SamplingParams | None  # sample the next token after the last one of this span; None in mid-prompt
    output_position: int  # of the token to sample
    output_history: tuple[int, ...] = ()
    seen: SeenTokens | None = None
    scored_token_ids: tuple[int, ...] = ()
    num_top_scores: int = 0
    draft_token_ids: tuple[int, ...] = ()
    num_candidates: int = 0  # of a beam: its likeliest next tokens are wanted instead of one

    @classmethod
    def of(cls, sequence: Sequence, num_new: int, block_size: int) -> "ScheduledSpan":
        """Return the next `num_new` uncomputed tokens of `sequence`."""
        start, sampling, known = sequence.num_computed_tokens, sequence.spec.sampling, sequence.token_ids
        end, num_prompt_tokens = start + num_new, sequence.num_prompt_tokens
        samples = end == len(known) and sampling.max_tokens != 0
        has_history = samples and sampling.needs_history
        is_scored = sampling.prompt_logprobs is not None and sequence.is_prompt_scored
        return cls(
            seq_id=sequence.seq_id,
            start=start,
            token_ids=tuple(known[start:end]),
            num_prompt_tokens=num_prompt_tokens,
            block_table=tuple(sequence.block_table[: -(-end // block_size)]),
            sampling=sampling if samples else None,
            output_position=len(known) - num_prompt_tokens,
            output_history=tuple(known[num_prompt_tokens:]) if has_history else (),
            seen=sequence.count_seen() if samples and sampling.has_penalties else None,
            scored_token_ids=sequence.spec.prompt_token_ids[start + 1 : end + 1] if is_scored else (),
            num_top_scores=(sampling.prompt_logprobs or 0) if is_scored else 0,
            num_candidates=sequence.spec.num_candidates,
        )

    @classmethod
    def of_branch(cls, follower: Sequence) -> "ScheduledSpan":
        """Return the first token of a branch, sampled where its leader's span ends."""
        sampling = follower.spec.sampling
        samples = sampling.max_tokens != 0
        has_history = samples and sampling.needs_history
        return cls(
            seq_id=follower.seq_id,
            start=follower.num_tokens,
            token_ids=(),
            num_prompt_tokens=follower.num_prompt_tokens,
            block_table=(),
            sampling=sampling if samples else None,
            output_position=follower.num_output_tokens,
            output_history=tuple(follower.token_ids[follower.num_prompt_tokens :]) if has_history else (),
            seen=follower.count_seen() if samples and sampling.has_penalties else None,
        )

    def after_drafts(self, num_accepted: int) -> "ScheduledSpan":
        """Return the span that would stand here, had its first drafts been sampled one step at a time."""
        if num_accepted == 0:
            return replace(self, draft_token_ids=()) if self.draft_token_ids else self
        assert self.sampling is not None
        accepted = self.draft_token_ids[:num_accepted]
        return replace(
            self,
            start=self.start + len(self.token_ids) + num_accepted - 1,
            token_ids=accepted[-1:],
            output_position=self.output_position + num_accepted,
            output_history=(*self.output_history, *accepted) if self.sampling.needs_history else (),
            seen=None if self.seen is None else self.seen.followed_by(accepted),
            scored_token_ids=(),
            draft_token_ids=(),
        )


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block whose content another block must have before the step writes: copy on write."""

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The spans of one step; `block_copies` are made first, in their order."""

    spans: tuple[ScheduledSpan, ...]
    block_copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in this step, drafts aside."""
        return sum(len(span.token_ids) for span in self.spans)
