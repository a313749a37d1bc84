"""Admits requests and starts their generations; keeps the counts of what became of them."""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType

from pdserve.control.errors import RedisUnavailable
from pdserve.control.request_state import RequestFacts, RequestStatus, StatusChange
from pdserve.control.request_store import RequestStore
from pdserve.gateway.admission import GatewayLoad, admit, output_limit
from pdserve.gateway.dispatch_config import DispatchConfig
from pdserve.gateway.errors import AdmissionRefused
from pdserve.gateway.generation import GenerationRequest, Route
from pdserve.gateway.node_pool import NodePool
from pdserve.gateway.node_view import NodeView
from pdserve.gateway.path_proofs import Path, PathProofs
from pdserve.gateway.prefix_affinity import PrefixAffinity
from pdserve.gateway.request_ledger import RequestLedger
from pdserve.gateway.request_recorder import RequestRecorder
from pdserve.gateway.running_generation import GenerationContext, RunningGeneration
from pdserve.gateway.shared_start import SharedStart

_REDIS_RETRY_S = 2.0
_SEED_BITS = 63
_LEFT_DURING_ADMISSION = (StatusChange(RequestStatus.CANCELLED, "the client left during admission"),)
_ACTIVE = tuple(status for status in RequestStatus if not status.is_terminal)


@dataclass(frozen=True, slots=True)
class DispatchSnapshot:
    """`requests`: active statuses as they are now, terminal ones since start. `routes`: requests that had a
    token. `retries`: attempts that were made again, by cause.
    """

    requests: Mapping[RequestStatus, int]
    routes: Mapping[Route, int]
    num_inflight: int
    num_attempts: int
    num_record_changes_dropped: int
    retries: Mapping[str, int]


class Dispatcher:
    """A `GenerationSource`. Invariant: every request that was admitted is counted in exactly one status."""

    def __init__(
        self,
        pool: NodePool,
        store: RequestStore,
        recorder: RequestRecorder,
        config: DispatchConfig,
        gateway_id: str,
    ) -> None:
        self._pool = pool
        self._store = store
        self._recorder = recorder
        self._config = config
        self._gateway_id = gateway_id
        self._ledger = RequestLedger()
        self._affinity = PrefixAffinity()
        self._context = GenerationContext(pool, pool.views, recorder, self._affinity, config, self._note_proof)
        self._is_draining = False
        self.proofs = PathProofs()

    async def start_branches(self, requests: Sequence[GenerationRequest]) -> list[RunningGeneration]:
        """Admit the branches of one prompt, which differ in id and seed only; all of them or none.

        Raises:
            AdmissionRefused: one of them is not taken now.
            InvalidRequest: no node can ever hold them.
        """
        if len(requests) == 1:
            return [await self._start(requests[0], len(requests[0].prompt_token_ids), None)]
        shared_start = SharedStart()
        generations = []
        async with AsyncExitStack() as stack:
            for position, request in enumerate(requests):
                num_tokens = len(request.prompt_token_ids) if position == 0 else 0  # the prompt is computed once
                generation = await self._start(request, num_tokens, shared_start)
                generations.append(await stack.enter_async_context(generation))
            stack.pop_all()  # from here they are the caller's to enter
        return generations

    async def _start(
        self, request: GenerationRequest, num_tokens: int, shared_start: SharedStart | None
    ) -> RunningGeneration:
        begun = time.monotonic()
        views = self._pool.views()
        load = GatewayLoad(self._num_inflight, self._ledger.mean_duration_s, self._is_draining)
        admit(num_tokens, views, load, self._config)
        self._affinity.keep(frozenset(view.key for view in views))
        prepared = self._prepare(request, views)
        self._ledger.open()
        try:
            await self._create_record(prepared)
        except asyncio.CancelledError:
            self._ledger.move(RequestStatus.QUEUED, _LEFT_DURING_ADMISSION)
            self._record_departure(prepared)
            raise
        except BaseException:
            self._ledger.withdraw()
            raise
        return RunningGeneration(prepared, self._context, self._ledger, begun, shared_start)

    async def probe(self, request: GenerationRequest, path: Path) -> RunningGeneration:
        """Start a request of the gateway's own, once, on the nodes of `path` alone: neither counted nor subject to
        load limits.

        Raises:
            AdmissionRefused: there is no decode node, or no Redis.
            InvalidRequest: no node can ever hold it.
        """
        begun = time.monotonic()
        prepared = self._prepare(request, self._pool.views())
        try:
            await self._create_record(prepared)
        except asyncio.CancelledError:
            self._record_departure(prepared)
            raise
        once = replace(self._config, max_attempts=1, min_disaggregated_tokens=0, migration_wait_s=0.0)
        context = replace(self._context, views=lambda: self._views_of(path), config=once)
        return RunningGeneration(prepared, context, None, begun)

    def drain(self) -> None:
        """Admit nothing more; what is in flight goes on."""
        self._is_draining = True

    def snapshot(self) -> DispatchSnapshot:
        """Return the counts as they are now."""
        return DispatchSnapshot(
            requests=MappingProxyType(dict(self._ledger.requests)),
            routes=MappingProxyType(dict(self._ledger.routes)),
            num_inflight=self._num_inflight,
            num_attempts=self._ledger.num_attempts,
            num_record_changes_dropped=self._recorder.counts.dropped,
            retries=MappingProxyType(dict(self._ledger.retries)),
        )

    @property
    def _num_inflight(self) -> int:
        return sum(self._ledger.requests[status] for status in _ACTIVE)

    def _prepare(self, request: GenerationRequest, views: tuple[NodeView, ...]) -> GenerationRequest:
        """Fix what must be the same in every attempt: the seed, and how long the output may become.

        Stop strings stay here: nodes know no text.
        """
        sampling = request.sampling
        max_tokens = output_limit(request, views)
        seed = secrets.randbits(_SEED_BITS) if sampling.seed is None else sampling.seed
        if sampling.max_tokens is None:
            sampling = replace(sampling, max_tokens=max_tokens)
        return replace(request, sampling=sampling.dispatched(seed))

    async def _create_record(self, request: GenerationRequest) -> None:
        try:
            await self._store.create(request.request_id, self._gateway_id, len(request.prompt_token_ids))
        except RedisUnavailable as error:
            self._pool.note_redis_lost()
            raise AdmissionRefused(
                "redis_unavailable", "requests cannot be recorded now: Redis does not answer", _REDIS_RETRY_S
            ) from error

    def _record_departure(self, request: GenerationRequest) -> None:
        """End the record of a request whose client left while it was being written; it may or may not be there."""
        self._recorder.record(request.request_id, RequestStatus.QUEUED, _LEFT_DURING_ADMISSION, RequestFacts())

    def _views_of(self, path: Path) -> tuple[NodeView, ...]:
        return tuple(view for view in self._pool.views() if view.key in path)

    def _note_proof(self, path: Path) -> None:
        self.proofs.note_proof(path, time.monotonic())
