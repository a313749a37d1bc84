"""The seam between HTTP and dispatch: what one sequence asks for, what comes back, and how it is followed.

Knows token ids, not text: stop strings, detokenization and choices are HTTP's business. A request with
several prompts or `n > 1` is several `GenerationRequest`s, each with an id of its own; those of one prompt are begun
together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from pdserve.control.messages import FinishReason, TokenLogprobs
from pdserve.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `request_id` is unique, never the client's; `timeout_s` bounds all of it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    timeout_s: float = 600.0


class GenerationEvent(NamedTuple):
    """Output tokens [start, start + len(token_ids)): in order, no gap, no repeat, whichever nodes made them.

    The last event has a `finish_reason`; a token that ended the sequence (EOS, stop id) is in `token_ids`: it
    is usage, it has no text. `logprobs`, when asked for, has one entry for each token; `prompt_logprobs`, when
    asked for, come with the first event: one entry for each prompt token after the first.
    """

    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class Route(StrEnum):
    """How a request's tokens were made."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"
    MIGRATED = "migrated"


class StageTimings(NamedTuple):
    """Milliseconds from `start` to each milestone; None if it was not reached."""

    admitted_ms: float | None = None
    prefilling_ms: float | None = None
    transferring_ms: float | None = None
    first_token_ms: float | None = None
    decoding_ms: float | None = None
    ended_ms: float | None = None


class GenerationStats(NamedTuple):
    """The facts about a generation so far; complete once it has ended.

    `num_cached_tokens` counts prompt tokens that were not computed, as the node that first computed the
    prompt said, and `queue_s` is how long it waited in that node before. `seed` is the one in use, drawn when the
    request had none. Node ids are those of the last attempt.
    """

    route: Route
    prefill_node_id: str | None
    decode_node_id: str | None
    seed: int
    num_attempts: int
    num_output_tokens: int
    num_cached_tokens: int | None
    timings: StageTimings
    queue_s: float | None = None


class Generation(Protocol):
    """An admitted request: an async context manager, for one consumer, who must enter it.

    Its events end with the one that has a finish reason, or with `GenerationFailed`. Leaving the context
    before that cancels the work on every node at once and records CANCELLED, unless `finish_early` was
    called.
    """

    @property
    def stats(self) -> GenerationStats:
        """Return what is known so far."""

    def planned_route(self) -> Route | None:
        """Return the route that it is about to take, before it is followed; None while there is none."""

    async def finish_early(self, reason: FinishReason) -> None:
        """End with what was received (a stop string matched): free the nodes, record FINISHED. Idempotent."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def follow(self, take: Callable[[GenerationEvent], bool]) -> None:
        """Give each event to `take` the moment it comes, until it returns True or has had the last one.

        Who wants more after that calls again.

        Raises:
            GenerationFailed: the request cannot be finished.
            Exception: whatever `take` raises.
        """


class GenerationSource(Protocol):
    """Who admits requests: the `Dispatcher` in a gateway."""

    async def start_branches(self, requests: Sequence[GenerationRequest]) -> Sequence[Generation]:
        """Admit and begin the branches of one prompt, all or none, before any byte of a reply is sent.

        They differ in `request_id` and seed only.

        Raises:
            AdmissionRefused: one of them is not taken now.
            InvalidRequest: they can never be served.
        """
