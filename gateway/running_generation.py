"""One admitted request from its first attempt to its one end: sends tasks, merges what nodes say, migrates."""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pdserve.control.errors import ChannelLost, MessageError
from pdserve.control.messages import FinishReason, GenerationTask, StageReport, TaskFailed, TokenChunk
from pdserve.control.request_state import RequestFacts, RequestProgress, RequestStatus
from pdserve.gateway.attempt import Attempt
from pdserve.gateway.attempt_inbox import AttemptEvent, NodeLost
from pdserve.gateway.dispatch_config import DispatchConfig
from pdserve.gateway.errors import GenerationFailed, ProtocolViolation
from pdserve.gateway.generation import GenerationEvent, GenerationRequest, GenerationStats, Route, StageTimings
from pdserve.gateway.node_pool import NodePool
from pdserve.gateway.node_view import NodeKey, NodeView
from pdserve.gateway.path_proofs import Path
from pdserve.gateway.prefix_affinity import PrefixAffinity, block_digests
from pdserve.gateway.request_ledger import RequestLedger
from pdserve.gateway.request_recorder import RequestRecorder
from pdserve.gateway.router import RouteFacts, RoutePlan, choose
from pdserve.gateway.shared_start import SharedStart
from pdserve.gateway.token_merge import TokenMerge

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """What every generation of a dispatcher shares.

    `views` says which nodes may be used. `on_proof` hears of the path by which a decode node's token came.
    """

    pool: NodePool
    views: Callable[[], tuple[NodeView, ...]]
    recorder: RequestRecorder
    affinity: PrefixAffinity
    config: DispatchConfig
    on_proof: Callable[[Path], None]


class RunningGeneration:
    """A `Generation`. Owns at most one open attempt; `_end` runs exactly once and leaves nothing on any node.

    All of it runs in its consumer's own task: cancelling that task, or leaving the context, is the
    cancellation. `sampling` of the request has a seed and a limit. `ledger` is None for what is not a user's
    request. Branches of one prompt have a `shared_start` in common.
    """

    def __init__(
        self,
        request: GenerationRequest,
        context: GenerationContext,
        ledger: RequestLedger | None,
        begun: float,
        shared_start: SharedStart | None = None,
    ) -> None:
        self._request = request
        self._shared_start = shared_start
        if shared_start is not None:
            shared_start.join(request)
        self._context = context
        self._ledger = ledger
        self._begun = begun
        self._deadline = begun + request.timeout_s
        self._progress = RequestProgress(request.request_id)
        assert request.sampling.max_tokens is not None and request.sampling.seed is not None
        self._max_tokens = request.sampling.max_tokens
        self._seed = request.sampling.seed
        is_scored = request.sampling.prompt_logprobs is not None
        self._merge = TokenMerge(
            self._max_tokens,
            has_logprobs=request.sampling.logprobs is not None,
            num_prompt_logprobs=len(request.prompt_token_ids) - 1 if is_scored else None,
        )
        self._ready: deque[GenerationEvent] = deque()
        self._attempt: Attempt | None = None
        self._planned: RoutePlan | None = None  # for the first attempt, before it begins
        self._last_plan: RoutePlan | None = None
        self._num_attempts = 0
        self._avoided: frozenset[NodeKey] = frozenset()
        self._failure: GenerationFailed | None = None
        self._num_cached_tokens: int | None = None
        self._queue_s: float | None = None
        self._timings = StageTimings(admitted_ms=self._elapsed_ms())

    @property
    def stats(self) -> GenerationStats:
        """Return what is known so far."""
        plan = self._last_plan
        return GenerationStats(
            route=self._route,
            prefill_node_id=plan.prefill.node_id if plan and plan.prefill else None,
            decode_node_id=plan.decode.node_id if plan else None,
            seed=self._seed,
            num_attempts=self._num_attempts,
            num_output_tokens=self._merge.num_tokens,
            num_cached_tokens=self._num_cached_tokens,
            timings=self._timings,
            queue_s=self._queue_s,
        )

    def planned_route(self) -> Route | None:
        """Return where the first attempt goes if it begins now; None while there is no decode node for it."""
        if self._planned is None:
            self._planned = self._choose()
        return None if self._planned is None else self._planned.route

    async def finish_early(self, reason: FinishReason) -> None:
        """End with what was received; FINISHED is recorded."""
        self._ready.clear()
        self._end(RequestStatus.FINISHED, finish_reason=reason, note="stopped by the gateway")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        note = exc_type.__name__ if exc_type else "left early"
        self._end(RequestStatus.CANCELLED, note=note, error_code="cancelled")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationEvent:
        events: list[GenerationEvent] = []

        def take(event: GenerationEvent) -> bool:
            events.append(event)
            return True

        await self.follow(take)
        if not events:
            raise StopAsyncIteration
        return events[0]

    async def follow(self, take: Callable[[GenerationEvent], bool]) -> None:
        """Give each event to `take` the moment it comes; see `Generation`."""
        has_enough = False

        def give() -> bool:
            nonlocal has_enough
            while self._ready and not has_enough:
                has_enough = take(self._ready.popleft())
            return has_enough

        try:
            while not give() and not self._progress.status.is_terminal:
                await self._step(give)
        except GenerationFailed as error:
            self._end(RequestStatus.FAILED, error_code=error.code, note=error.code)
            raise

    @property
    def _route(self) -> Route:
        if self._num_attempts > 1:
            return Route.MIGRATED
        return Route.DISAGGREGATED if self._last_plan is None else self._last_plan.route

    def _elapsed_ms(self) -> float:
        return (time.monotonic() - self._begun) * 1000

    def _remaining_s(self) -> float:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise GenerationFailed("timeout", f"not finished within {self._request.timeout_s:g} s", False)
        return remaining_s

    async def _step(self, give: Callable[[], bool]) -> None:
        """Begin an attempt if there is none, then hear of it until it is over, or `give` has given enough, or a gap
        opens or may be closed: it has a deadline of its own.
        """
        if self._attempt is None:
            self._attempt = await self._begin_attempt()
        attempt = self._attempt
        remaining_s = self._remaining_s()
        had_gap = self._merge.has_gap
        wait_s = min(remaining_s, self._context.config.gap_timeout_s) if had_gap else remaining_s

        def hear(event: AttemptEvent) -> bool:
            message = event.message
            if isinstance(message, TokenChunk):
                self._take_tokens(attempt, event.node, message)
            else:
                self._hear(attempt, event)
            if self._ready and give():
                return True
            return self._attempt is not attempt or had_gap or self._merge.has_gap

        try:
            await attempt.inbox.hear(wait_s, hear)
        except TimeoutError:
            self._remaining_s()
            self._give_up(attempt.nodes, GenerationFailed("protocol", "a chunk of tokens is missing", True))
        except ProtocolViolation as error:
            self._give_up(attempt.nodes, GenerationFailed("protocol", str(error), True))

    async def _begin_attempt(self) -> Attempt:
        """Send the tasks to the best nodes, waiting a bounded time for a decode node.

        Raises:
            GenerationFailed: no attempt is left, no node came, or the request's time is over.
        """
        if self._shared_start is not None and (begun := self._shared_start.take(self._request.request_id)):
            self._shared_start = None
            self._note_attempt(begun.plan)
            return begun
        config = self._context.config
        wait_until = time.monotonic() + config.migration_wait_s
        while True:
            if self._failure is not None and self._num_attempts >= config.max_attempts:
                raise self._failure
            plan = self._planned or self._choose()
            if plan is not None:
                await self._back_off(plan)
                try:
                    return self._send(plan)
                except MessageError as error:
                    raise GenerationFailed("invalid_request", str(error), False) from error
                except ChannelLost as error:
                    self._failure = GenerationFailed("node_lost", str(error), True)
                    self._avoided |= frozenset(plan.nodes)
                    continue
            wait_s = min(wait_until - time.monotonic(), self._remaining_s())
            if wait_s <= 0:
                raise GenerationFailed("node_lost", "no decode node is there to go on with this request", True)
            await self._context.pool.wait_for_change(wait_s)

    def _choose(self) -> RoutePlan | None:
        context = self._context
        return choose(self._route_facts(), context.views(), context.affinity, context.config)

    async def _back_off(self, plan: RoutePlan) -> None:
        """Wait a little before a node that just failed this request is asked again, as there is no other."""
        if self._avoided and self._avoided & frozenset(plan.nodes):
            backoff_s = _FIRST_BACKOFF_S * 2**self._num_attempts * random.uniform(0.5, 1.0)
            await asyncio.sleep(min(backoff_s, self._remaining_s()))

    def _route_facts(self) -> RouteFacts:
        prompt = self._request.prompt_token_ids
        return RouteFacts(
            token_ids=prompt + self._merge.token_ids,
            max_len=len(prompt) + self._max_tokens,
            cache_salt=self._request.cache_salt,
            model_digest=self._last_plan.decode.model_digest if self._last_plan else None,
            avoided=self._avoided,
        )

    def _send(self, plan: RoutePlan) -> Attempt:
        self._note_attempt(plan)
        digests = block_digests(
            self._request.prompt_token_ids + self._merge.token_ids,
            plan.decode.block_size,
            self._request.cache_salt,
        )
        shared_start, self._shared_start = self._shared_start, None
        if shared_start is not None:
            attempt = shared_start.begin(self._context.pool, plan, self._task(), self._max_tokens)
        else:
            (attempt,) = Attempt.begin(self._context.pool, plan, self._task(), self._max_tokens)
        self._context.affinity.record(attempt.decode_key, digests)
        return attempt

    def _note_attempt(self, plan: RoutePlan) -> None:
        self._num_attempts += 1
        self._planned, self._last_plan = None, plan
        if self._ledger is not None:
            self._ledger.num_attempts += 1

    def _task(self) -> GenerationTask:
        return GenerationTask(
            request_id=self._request.request_id,
            attempt_id=f"{self._request.request_id}:{self._num_attempts}",
            prompt_token_ids=self._request.prompt_token_ids,
            output_token_ids=self._merge.token_ids,
            sampling=self._request.sampling,
            cache_salt=self._request.cache_salt,
            timeout_s=self._remaining_s(),
        )

    def _hear(self, attempt: Attempt, event: AttemptEvent) -> None:
        message = event.message
        if isinstance(message, StageReport):
            self._reach(attempt, RequestStatus(message.stage.value))
        elif isinstance(message, TaskFailed):
            is_of_all = message.code == "transfer_failed"
            self._give_up(attempt.nodes if is_of_all else (event.node,), _failure_of(message))
        elif isinstance(message, NodeLost) and (event.node == attempt.decode_key or not attempt.is_decoding):
            # A prefill node that is lost after the hand-over takes nothing with it.
            failure = GenerationFailed("node_lost", f"node {event.node.node_id}: {message.reason}", True)
            self._give_up((event.node,), failure)

    def _take_tokens(self, attempt: Attempt, node: NodeKey, chunk: TokenChunk) -> None:
        if self._num_cached_tokens is None:
            self._num_cached_tokens = chunk.num_cached_tokens
        if self._queue_s is None:
            self._queue_s = chunk.queue_s
        is_decoding = node == attempt.decode_key
        if not attempt.is_decoding:
            self._reach(attempt, RequestStatus.DECODING if is_decoding else RequestStatus.PREFILLING)
        events = self._merge.add(chunk)
        if not events:
            return
        if self._timings.first_token_ms is None:
            self._timings = self._timings._replace(first_token_ms=self._elapsed_ms())
        self._ready.extend(events)
        # A prefill node's one token may release those of the decode node, if they have overtaken it.
        if is_decoding or sum(len(event.token_ids) for event in events) > len(chunk.token_ids):
            self._context.on_proof(attempt.nodes)
        if self._merge.is_finished:
            self._end(RequestStatus.FINISHED, finish_reason=events[-1].finish_reason)

    def _reach(self, attempt: Attempt, status: RequestStatus) -> None:
        if not attempt.reach(status):
            return
        name = f"{status.value}_ms"
        if getattr(self._timings, name) is None:
            self._timings = self._timings._replace(**{name: self._elapsed_ms()})
        if status is not self._progress.status:
            self._move(status, note=f"attempt {self._num_attempts}")

    def _give_up(self, nodes: tuple[NodeKey, ...], failure: GenerationFailed) -> None:
        """Free the attempt on every node; the next one is made elsewhere unless `failure` is final."""
        request_id = self._request.request_id
        logger.info("attempt %d: %s", self._num_attempts, failure, extra={"request_id": request_id})
        if self._attempt is not None:
            self._attempt.cancel(failure.code)
            self._attempt = None
        self._merge.restart()
        self._avoided |= frozenset(nodes)
        self._failure = failure
        if not failure.retryable:
            raise failure
        if self._ledger is not None:
            self._ledger.retry(failure.code)

    def _move(
        self,
        target: RequestStatus,
        *,
        note: str = "",
        finish_reason: FinishReason | None = None,
        error_code: str | None = None,
    ) -> None:
        plan = self._last_plan
        before = self._progress.status
        path = self._progress.advance(target, note)
        facts = RequestFacts(
            num_attempts=self._num_attempts,
            route=self._route.value,
            prefill_node_id=plan.prefill.node_id if plan and plan.prefill else None,
            decode_node_id=plan.decode.node_id if plan else None,
            num_output_tokens=self._merge.num_tokens,
            finish_reason=finish_reason.value if finish_reason else None,
            error_code=error_code,
        )
        if self._ledger is not None:
            self._ledger.move(before, path)
        self._context.recorder.record(self._request.request_id, before, path, facts)

    def _end(
        self,
        status: RequestStatus,
        *,
        note: str = "",
        finish_reason: FinishReason | None = None,
        error_code: str | None = None,
    ) -> None:
        """Close the attempt and record the one terminal status; later calls do nothing."""
        if self._progress.status.is_terminal:
            return
        if self._shared_start is not None:
            self._shared_start.leave(self._request.request_id)
        if self._attempt is not None:
            if self._merge.is_finished:
                self._attempt.finish()
            else:
                self._attempt.cancel(note or status.value)
            self._attempt = None
        self._timings = self._timings._replace(ended_ms=self._elapsed_ms())
        self._move(status, note=note, finish_reason=finish_reason, error_code=error_code)
        if self._ledger is not None:
            self._ledger.end(self._route if self._merge.num_tokens else None, self._elapsed_ms() / 1000)


def _failure_of(message: TaskFailed) -> GenerationFailed:
    code = "timeout" if message.code == "deadline" else message.code
    # Of a broken transfer each end knows half: whichever speaks first, the tokens can still be made elsewhere.
    is_retryable = message.retryable or message.code == "transfer_failed"
    return GenerationFailed(code, message.message, is_retryable)
