"""What a step gives back for one sequence. Torch-free."""

from dataclasses import dataclass
from enum import StrEnum

from pdserve.engine.block_pool import BlockId
from pdserve.kernels.hot_dataclass import hot_dataclass


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The logprob of a given token under the model, and the likeliest alternatives (id, logprob) at its place."""

    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]


@hot_dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token, or the reason why none could be sampled.

    `logprob` and `top_logprobs` (id, logprob; most likely first) are of the model's own distribution, before penalties,
    temperature, truncation and grammar; None unless asked for. `is_bad_request` tells a failure that the request
    brought about. `completes_grammar`: the structured answer is whole, and nothing can be added to it.
    """

    token_id: int | None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    failure: str | None = None
    is_bad_request: bool = False
    completes_grammar: bool = False


@hot_dataclass(frozen=True, slots=True)
class StepOutput:
    """The progress of one sequence in one step.

    `token` is None while the prompt is still being computed. A `failure` is terminal. `exported_blocks` is the block
    table of a sequence that is being shipped; the blocks that are full so far will not change any more.
    `prompt_scores`, where they were asked for, are those of all prompt tokens after the first; they come with the first
    output token, or with the end of a sequence that wanted none (`finish_reason` without a token). `queue_s` is the
    time from arrival to start here, told with the first token. `is_overdue` tells a failure of the load alone.
    """

    seq_id: str
    output_position: int
    token: SampledToken | None
    finish_reason: FinishReason | None
    num_computed_tokens: int
    num_cached_tokens: int
    failure: str | None = None
    exported_blocks: tuple[BlockId, ...] = ()
    prompt_scores: tuple[TokenScore, ...] | None = None
    queue_s: float | None = None
    is_overdue: bool = False

    @classmethod
    def overdue(cls, seq_id: str, output_position: int, limit_s: float) -> "StepOutput":
        """Return the end of a sequence that waited for `limit_s` and was not computed."""
        failure = f"waited for {limit_s:g} s without being computed: the engine has too much to do"
        return cls(seq_id, output_position, None, None, 0, 0, failure, is_overdue=True)

    @property
    def failure_code(self) -> str:
        """Whose fault a failure is, as the control plane says it."""
        if self.is_overdue:
            return "queue_timeout"
        is_bad_request = self.token is not None and self.token.is_bad_request
        return "invalid_request" if is_bad_request else "engine_error"
