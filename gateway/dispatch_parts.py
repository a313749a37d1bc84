"""Opens the dispatch half of a gateway and keeps its loops running."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import zmq.asyncio

from pdserve.control.errors import RedisUnavailable
from pdserve.control.gateway_peers import GatewayPeers
from pdserve.control.keyspace import Keyspace
from pdserve.control.node_registry import NodeRegistry
from pdserve.control.quota_store import QuotaStore
from pdserve.control.redis_connection import RedisConnection, connect
from pdserve.control.request_store import RecordLifetimes, RequestStore
from pdserve.control.response_store import ResponseStore
from pdserve.gateway.canary import Canary
from pdserve.gateway.config import GatewayConfig
from pdserve.gateway.deps import Backend
from pdserve.gateway.dispatch_status import DispatchStatus
from pdserve.gateway.dispatcher import Dispatcher
from pdserve.gateway.first_failure import first_failure
from pdserve.gateway.node_pool import NodePool
from pdserve.gateway.request_recorder import RequestRecorder

_LINGER_MS = 300
_FLUSH_S = 1.0
_SPARE_LEASE_S = 10.0


@dataclass(frozen=True, slots=True)
class OpenDispatch:
    """What the HTTP half needs of the dispatch half."""

    dispatcher: Dispatcher
    backend: Backend


@asynccontextmanager
async def open_dispatch(config: GatewayConfig, canary_prompt: tuple[int, ...]) -> AsyncIterator[OpenDispatch]:
    """Find nodes, record requests and prove the path while the block runs; a loop that fails ends the block."""
    context = zmq.asyncio.Context()
    redis = connect(config.redis_url)
    try:
        async with first_failure(), asyncio.TaskGroup() as loops:
            parts, recorder, tasks = _start(config, redis, context, canary_prompt, loops)
            try:
                yield parts
                await recorder.flush(_FLUSH_S)
                with suppress(RedisUnavailable):
                    await parts.backend.peers.leave()
            finally:
                for task in tasks:
                    task.cancel()
    finally:
        await redis.close()
        context.destroy(linger=_LINGER_MS)


def _start(
    config: GatewayConfig,
    redis: RedisConnection,
    context: zmq.asyncio.Context,
    canary_prompt: tuple[int, ...],
    loops: asyncio.TaskGroup,
) -> tuple[OpenDispatch, RequestRecorder, list[asyncio.Task[None]]]:
    keyspace = Keyspace(config.namespace)
    gateway_id = config.gateway_id or f"gateway-{secrets.token_hex(4)}"
    store = RequestStore(redis, keyspace, RecordLifetimes.of_requests(config.http.request_timeout_s))
    recorder = RequestRecorder(store)
    pool = NodePool(NodeRegistry(redis, keyspace), context, config.pool, gateway_id, config.keys)
    dispatcher = Dispatcher(pool, store, recorder, config.dispatch, gateway_id)
    canary = Canary(dispatcher, pool, canary_prompt, config.canary)
    tasks: list[asyncio.Task[None]] = [
        loops.create_task(pool.run(), name="node pool"),
        loops.create_task(recorder.run(), name="request recorder"),
        loops.create_task(canary.run(), name="canary"),
    ]
    backend = Backend(
        source=dispatcher,
        status=DispatchStatus(pool, dispatcher, canary),
        records=recorder,
        peers=GatewayPeers(redis, keyspace, gateway_id),
        responses=ResponseStore(redis, keyspace, config.http.response_ttl_s),
        quotas=QuotaStore(redis, keyspace, config.http.request_timeout_s + _SPARE_LEASE_S),
    )
    return OpenDispatch(dispatcher, backend), recorder, tasks
