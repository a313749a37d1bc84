"""A validated request: what to generate, and how it is shown. Everything after this carries token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pdserve.engine.errors import InvalidRequest
from pdserve.engine.sampling_params import MAX_BRANCHES, SamplingParams
from pdserve.gateway.answer_reader import PLAIN, AnswerReading
from pdserve.gateway.error_responses import ContextLengthExceeded
from pdserve.gateway.generation import GenerationRequest
from pdserve.gateway.schemas import GenerationBody

_MAX_PROMPT_LOGPROBS = 2**17  # of one answer, over all prompts, choices and alternatives: 0.5 s of the event loop


class Endpoint(StrEnum):
    """The ways to ask for text."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    MESSAGES = "messages"
    RESPONSES = "responses"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """How the answer is shown."""

    is_stream: bool
    include_usage: bool
    continuous_usage: bool
    include_stop: bool
    skip_special_tokens: bool
    return_token_ids: bool
    return_route_info: bool = False
    echo: bool = False
    prompt_logprobs: int | None = None

    @classmethod
    def of(cls, body: GenerationBody) -> "ReplyOptions":
        """Return what `body` asks for; all is off by default, but special tokens are skipped."""
        stream = body.stream_options
        if stream is not None and not body.stream:
            raise InvalidRequest("stream_options", "needs stream to be true")
        if body.stream and body.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs", "cannot be combined with stream; echo with logprobs can")
        return cls(
            is_stream=bool(body.stream),
            include_usage=bool(stream and stream.include_usage),
            continuous_usage=bool(stream and stream.continuous_usage_stats),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            return_token_ids=bool(body.return_token_ids),
            return_route_info=bool(body.return_route_info),
            prompt_logprobs=body.prompt_logprobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """What one HTTP request asked for. Choice p * num_choices + j is the j-th choice of prompt p.

    Where `num_kept` says so, only the best choices of each prompt are shown.
    """

    endpoint: Endpoint
    response_id: str
    created: int
    model: str
    prompts: tuple[tuple[int, ...], ...]
    num_choices: int  # of each prompt
    sampling: SamplingParams  # for prompts of any length: max_tokens is set per prompt
    max_tokens: tuple[int, ...]  # of each prompt
    cache_salt: str
    timeout_s: float
    reply: ReplyOptions
    conversation: tuple[dict[str, Any], ...] = ()  # of a response: what it answers, as messages of a chat
    prompt_texts: tuple[str | None, ...] = ()  # of each prompt; None for one that came as token ids
    num_kept: int | None = None  # of each prompt; None is all
    reading: AnswerReading = PLAIN  # how the text of answers is taken apart

    @property
    def num_prompt_tokens(self) -> int:
        """Return the length of all prompts, each counted once."""
        return sum(map(len, self.prompts))

    @property
    def num_charged_tokens(self) -> int:
        """Return what a quota is charged at first: the prompts, and the answers' limit if the client gave one."""
        if self.sampling.max_tokens is None:
            return self.num_prompt_tokens
        return self.num_prompt_tokens + self.num_choices * sum(self.max_tokens)

    def prompt_of(self, index: int) -> tuple[int, ...]:
        """Return the prompt of choice `index`."""
        return self.prompts[index // self.num_choices]

    def prompt_text_of(self, index: int) -> str | None:
        """Return the prompt of choice `index` as the client wrote it; None if it came as token ids."""
        return self.prompt_texts[index // self.num_choices]

    def requests_by_prompt(self) -> list[list[GenerationRequest]]:
        """Return one request for each choice, in the order of their indexes, those of one prompt together."""
        return [
            [self._request(position, choice) for choice in range(self.num_choices)]
            for position in range(len(self.prompts))
        ]

    def _request(self, position: int, choice: int) -> GenerationRequest:
        n, best_of = self.num_kept or self.num_choices, self.num_choices
        sampling = self.sampling
        if (sampling.n, sampling.num_branches) != (n, best_of):
            sampling = replace(sampling, n=n, best_of=best_of)
        return GenerationRequest(
            request_id=f"{self.response_id}-{position * self.num_choices + choice}",
            prompt_token_ids=self.prompts[position],
            sampling=sampling.branch(choice, max_tokens=self.max_tokens[position], stop=()),
            cache_salt=self.cache_salt,
            timeout_s=self.timeout_s,
        )


def num_choices(body: GenerationBody, num_prompts: int, max_choices: int) -> int:
    """Return the checked `n`."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_BRANCHES:
        raise InvalidRequest("n", f"must be between 1 and {MAX_BRANCHES}")
    if n * num_prompts > max_choices:
        raise InvalidRequest("n", f"prompts times n must be at most {max_choices}, got {n * num_prompts}")
    return n


def prompt_limit(
    body: GenerationBody, max_model_len: int, max_tokens: int | None, default_max_tokens: int = 1
) -> int | None:
    """Return how many of a prompt's last tokens are kept; None: all of them, and too many are refused.

    `truncate_prompt_tokens` of -1 leaves room for an answer of `max_tokens`; where the client names none, for one of
    `default_max_tokens`, or of `min_tokens` if that is more.
    """
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return None
    if wanted == -1:
        answer = max(default_max_tokens, body.min_tokens or 0) if max_tokens is None else max_tokens
        return max(1, max_model_len - answer)
    if not 1 <= wanted <= max_model_len:
        raise InvalidRequest("truncate_prompt_tokens", f"must be -1, or between 1 and {max_model_len}")
    return wanted


def check_prompt_logprobs(prompts: Sequence[Sequence[int]], n: int, num_top: int | None, field: str) -> None:
    """Refuse more logprobs of prompt tokens than one answer may hold; None: there are none."""
    if num_top is None:
        return
    wanted = sum(map(len, prompts)) * n * (num_top + 1)
    if wanted > _MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            field, f"{wanted} logprobs of prompt tokens were asked for, at most {_MAX_PROMPT_LOGPROBS} are given"
        )


def output_limits(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams, max_model_len: int, field: str
) -> tuple[int, ...]:
    """Return max_tokens for each prompt: what was asked for, or else all the room there is.

    Raises:
        ContextLengthExceeded: a prompt, or a prompt with the tokens asked for, does not fit.
    """
    return tuple(_output_limit(len(prompt), sampling, max_model_len, field) for prompt in prompts)


def _output_limit(num_prompt_tokens: int, sampling: SamplingParams, max_model_len: int, field: str) -> int:
    room = max_model_len - num_prompt_tokens
    wanted = sampling.max_tokens
    if room < (0 if wanted == 0 else 1):
        raise ContextLengthExceeded(
            field,
            f"this model's maximum context length is {max_model_len} tokens, the prompt has "
            f"{num_prompt_tokens} tokens, which leaves no room for an answer",
        )
    if wanted is not None and wanted > room:
        raise ContextLengthExceeded(
            field,
            f"this model's maximum context length is {max_model_len} tokens, but "
            f"{num_prompt_tokens + wanted} were asked for "
            f"({num_prompt_tokens} in the prompt, {wanted} for the answer)",
        )
    limit = room if wanted is None else wanted
    if sampling.min_tokens > limit:
        raise InvalidRequest("min_tokens", f"{sampling.min_tokens} is more than the {limit} tokens there is room for")
    return limit
