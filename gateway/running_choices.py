"""All choices of one request while they are generated: each piece is shown by whoever heard of its tokens."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from pdserve.control.messages import FinishReason
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.choice_text import ChoicePiece, ChoiceText
from pdserve.gateway.first_failure import first_failure
from pdserve.gateway.generation import Generation, GenerationEvent, GenerationSource, GenerationStats, Route
from pdserve.gateway.generation_plan import GenerationPlan
from pdserve.gateway.metrics import GatewayMetrics
from pdserve.gateway.reply_shapes import Usage
from pdserve.gateway.token_times import TokenTimes


class Show(Protocol):
    """Who shows the pieces of an answer."""

    def show(self, piece: ChoicePiece) -> bool:
        """Show `piece` now; return whether the next one should wait until `caught_up` returns."""

    async def caught_up(self) -> None:
        """Wait for a client that reads more slowly than its answer grows."""


class RunningChoices:
    """The admitted generations of `plan` and what has come of them; for one consumer."""

    def __init__(
        self, plan: GenerationPlan, generations: Sequence[Generation], tokenizer: Tokenizer, metrics: GatewayMetrics
    ) -> None:
        self._plan = plan
        self._generations = tuple(generations)
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._num_tokens = [0] * len(generations)
        self._num_thought_tokens = [0] * len(generations)

    async def follow(self, show: Show) -> None:
        """Give the pieces of every choice to `show`, those of one choice in order, until all have ended.

        Raises:
            GenerationFailed: one of them cannot be finished.
        """
        if len(self._generations) == 1:
            await self._follow(0, show)
            return
        async with first_failure(), asyncio.TaskGroup() as group:
            for index in range(len(self._generations)):
                group.create_task(self._follow(index, show), name=f"choice-{self._plan.response_id}-{index}")

    def usage(self) -> Usage:
        """Return the tokens handed out; a prompt's cached tokens are those of its first choice."""
        first_choices = self._generations[:: self._plan.num_choices]
        return Usage(
            self._plan.num_prompt_tokens,
            sum(self._num_tokens),
            sum(generation.stats.num_cached_tokens or 0 for generation in first_choices),
            sum(self._num_thought_tokens) if self._plan.reading.has_thoughts else None,
        )

    def stats(self) -> list[GenerationStats]:
        """Return the facts about each choice."""
        return [generation.stats for generation in self._generations]

    def planned_route(self) -> Route | None:
        """Return the route that the first choice is about to take; None while there is none."""
        return self._generations[0].planned_route()

    def route(self) -> Route:
        """Return the route of the first choice."""
        return self._generations[0].stats.route

    async def _follow(self, index: int, show: Show) -> None:
        text = ChoiceText(index, self._plan, self._tokenizer)
        choice = _FollowedChoice(text, self._metrics.token_times, self._count, show)
        generation = self._generations[index]
        while not choice.is_over:
            await generation.follow(choice.take)
            if choice.is_stopped_early:
                await generation.finish_early(FinishReason.STOP)
            if choice.must_wait:
                await show.caught_up()

    def _count(self, piece: ChoicePiece) -> None:
        self._num_tokens[piece.index] = piece.num_tokens
        self._num_thought_tokens[piece.index] = piece.num_thought_tokens


class _FollowedChoice:
    """The text of a choice and how far it is followed."""

    def __init__(self, text: ChoiceText, times: TokenTimes, count: Callable[[ChoicePiece], None], show: Show) -> None:
        self._text = text
        self._times = times
        self._count = count
        self._show = show
        self._last_event_s: float | None = None
        self.is_over = False
        self.is_stopped_early = False  # by a stop string, while its nodes go on
        self.must_wait = False

    def take(self, event: GenerationEvent) -> bool:
        """Show what `event` completes; return whether it is enough for now."""
        now_s = time.monotonic()
        if self._last_event_s is not None and event.token_ids:
            num_tokens = len(event.token_ids)
            self._times.observe((now_s - self._last_event_s) / num_tokens, num_tokens)
        self._last_event_s = now_s
        piece = self._text.push(event)
        if event.finish_reason is not None or self._text.is_stopped:
            self.is_over = True
            self.is_stopped_early = event.finish_reason is None
        if piece is None:
            return self.is_over
        self._count(piece)
        self.must_wait = self._show.show(piece)
        return self.must_wait or self.is_over


@asynccontextmanager
async def running_choices(
    plan: GenerationPlan, source: GenerationSource, tokenizer: Tokenizer, metrics: GatewayMetrics
) -> AsyncIterator[RunningChoices]:
    """Admit all choices of `plan` or none; whatever still runs at the end is cancelled.

    Raises:
        AdmissionRefused: one of them is not taken.
    """
    async with AsyncExitStack() as stack:
        generations = []
        for requests in plan.requests_by_prompt():
            for generation in await source.start_branches(requests):
                generations.append(await stack.enter_async_context(generation))
        yield RunningChoices(plan, generations, tokenizer, metrics)
