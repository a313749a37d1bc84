"""One prompt of offline generation on its way to its completions: branches sampled, made text, ranked."""

from dataclasses import dataclass, field, replace

from pdserve.engine.detokenizer import IncrementalDetokenizer
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.ranking import best_indexes, logprob_per_token
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import FinishReason, SampledToken, StepOutput, TokenScore
from pdserve.engine.stop_strings import StopChecker
from pdserve.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion. `logprobs` has one entry a token when asked for, and `cumulative_logprob` is their sum.

    `finish_reason` is None if it was interrupted; `stop_reason` is the stop string or stop token id that ended it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[SampledToken, ...] | None = None
    cumulative_logprob: float | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its completions, in the order of the prompts given.

    With `best_of` the best completion comes first. `prompt_logprobs`, when asked for, has one entry a prompt token;
    None for the first, which follows nothing. `finished` is False if the prompt was interrupted.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenScore | None, ...] | None = None
    finished: bool = True


@dataclass(slots=True)
class BranchRun:
    """One completion while it grows."""

    spec: SequenceSpec
    detokenizer: IncrementalDetokenizer
    stops: StopChecker
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenScore | None, ...] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def take(self, output: StepOutput) -> bool:
        """Add an output; return whether the completion is finished by it.

        Raises:
            InvalidRequest: what was asked for leaves no token to sample.
        """
        if output.failure is not None and output.failure_code == "invalid_request":
            raise InvalidRequest("sampling_params", output.failure)
        if output.failure is not None:
            raise RuntimeError(f"generation failed: {output.failure}")
        if output.prompt_scores is not None:
            self.prompt_logprobs = (None, *output.prompt_scores)
        if output.token is None or output.token.token_id is None:
            self.finish_reason = output.finish_reason
            return self.is_finished
        self.tokens.append(output.token)
        self.num_cached_tokens = output.num_cached_tokens
        can_match = len(self.tokens) > self.spec.sampling.min_tokens
        self.text += self.stops.push(self.detokenizer.push(output.token.token_id), can_match)
        if output.finish_reason is not None and self.stops.matched is None:
            self.text += self.stops.push(self.detokenizer.finish(), can_match)
        if self.stops.matched is not None:
            self.finish_reason = FinishReason.STOP
        elif output.finish_reason is not None:
            self.text += self.stops.finish()
            self.finish_reason = output.finish_reason
        return self.is_finished

    def completion(self, index: int) -> CompletionOutput:
        """Return what has come of it."""
        token_ids = tuple(token.token_id for token in self.tokens if token.token_id is not None)
        has_logprobs = self.spec.sampling.logprobs is not None
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=token_ids,
            finish_reason=self.finish_reason,
            logprobs=tuple(self.tokens) if has_logprobs else None,
            cumulative_logprob=sum(token.logprob or 0.0 for token in self.tokens) if has_logprobs else None,
            stop_reason=self._stop_reason(token_ids),
        )

    def _stop_reason(self, token_ids: tuple[int, ...]) -> int | str | None:
        if self.stops.matched is not None:
            return self.stops.matched
        ended_by_id = self.finish_reason is FinishReason.STOP and token_ids[-1:]
        return token_ids[-1] if ended_by_id and token_ids[-1] in self.spec.sampling.stop_token_ids else None


@dataclass(frozen=True, slots=True)
class PromptRun:
    """A prompt and the branches sampled for it."""

    request_id: str
    prompt: str | None
    sampling: SamplingParams
    branches: tuple[BranchRun, ...]

    @classmethod
    def start(
        cls,
        request_id: str,
        text: str | None,
        token_ids: tuple[int, ...],
        sampling: SamplingParams,
        tokenizer: Tokenizer,
    ) -> "PromptRun":
        """Return the prompt with all its branches to come."""
        branches = tuple(
            BranchRun(
                SequenceSpec(f"{request_id}-{index}", token_ids, sampling.branch(index)),
                IncrementalDetokenizer(tokenizer, token_ids, sampling.skip_special_tokens),
                StopChecker(sampling.stop, sampling.include_stop_str_in_output),
            )
            for index in range(sampling.num_branches)
        )
        return cls(request_id, text, sampling, branches)

    @property
    def is_finished(self) -> bool:
        """Whether all branches are."""
        return all(branch.is_finished for branch in self.branches)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.branches[0].spec.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, in all branches."""
        return sum(len(branch.tokens) for branch in self.branches)

    def output(self) -> RequestOutput:
        """Return the completions that were wanted."""
        kept = self.branches
        if self.sampling.is_ranked:
            scores = [
                logprob_per_token([token.logprob for token in branch.tokens if token.logprob is not None])
                for branch in self.branches
            ]
            kept = tuple(self.branches[index] for index in best_indexes(scores, self.sampling.n))
        completions = tuple(branch.completion(index) for index, branch in enumerate(kept))
        if self.sampling.logprobs is None:
            completions = tuple(replace(each, logprobs=None, cumulative_logprob=None) for each in completions)
        first = self.branches[0]
        return RequestOutput(
            self.request_id,
            self.prompt,
            first.spec.prompt_token_ids,
            completions,
            first.num_cached_tokens,
            first.prompt_logprobs,
            self.is_finished,
        )
