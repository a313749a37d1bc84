"""Scripted nodes that speak the protocol on real sockets."""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import zmq.asyncio

from pdserve.control.channel import ControlServer, Peer
from pdserve.control.errors import RedisUnavailable
from pdserve.control.keyspace import Keyspace
from pdserve.control.messages import (
    BlockCounts,
    CancelTask,
    DecodeTask,
    FinishReason,
    GenerationTask,
    NodeInfo,
    NodeLoad,
    NodeRole,
    Ping,
    Pong,
    PrefillTask,
    Stage,
    StageReport,
    TaskFailed,
    TokenBatch,
    TokenChunk,
    ToNode,
    TransferCounts,
)
from pdserve.control.node_registry import NodeRegistry
from pdserve.control.redis_connection import RedisConnection, connect
from pdserve.control.request_state import RequestRecord, RequestStatus
from pdserve.control.request_store import RequestStore
from pdserve.engine.sampling_params import SamplingParams
from pdserve.gateway.dispatch_config import DispatchConfig, PoolConfig
from pdserve.gateway.dispatcher import Dispatcher
from pdserve.gateway.generation import GenerationRequest
from pdserve.gateway.node_pool import NodePool
from pdserve.gateway.node_view import NodeKey
from pdserve.gateway.request_recorder import RequestRecorder
from pdserve.gateway.running_generation import RunningGeneration


def token_at(prompt_token_ids: tuple[int, ...], seed: int, position: int) -> int:
    """The scripted model: a token is a function of prompt, seed and position, as in the real one."""
    return (sum(prompt_token_ids) * 31 + seed % 97 + position * 7) % 1000


Script = Callable[["ScriptedNode", Peer, ToNode], Awaitable[None]]


async def faithful(node: "ScriptedNode", peer: Peer, message: ToNode) -> None:
    """Behave as a node should, all at once."""
    match message:
        case PrefillTask(task=task):
            await node.report(peer, task, Stage.PREFILLING)
            await node.speak(peer, task, len(task.output_token_ids), len(task.output_token_ids) + 1)
        case DecodeTask(task=task, transfer_id=None):
            await node.report(peer, task, Stage.PREFILLING)
            await node.speak(peer, task, len(task.output_token_ids), task.sampling.max_tokens)
        case DecodeTask(task=task):
            await node.report(peer, task, Stage.TRANSFERRING)
            await node.report(peer, task, Stage.DECODING)
            await node.speak(peer, task, len(task.output_token_ids) + 1, task.sampling.max_tokens)


async def faithful_to_each_branch(node: "ScriptedNode", peer: Peer, message: ToNode) -> None:
    """Behave as a node should, for every branch of a task."""
    await faithful(node, peer, message)
    if isinstance(message, PrefillTask | DecodeTask):
        task = message.task
        for fork in task.forks:
            sampling = dataclasses.replace(task.sampling, seed=fork.seed)
            branch = dataclasses.replace(task, attempt_id=fork.attempt_id, sampling=sampling, forks=())
            await faithful(node, peer, dataclasses.replace(message, task=branch))


class ScriptedNode:
    """A peer on real sockets that says of a task what its script says. `heard` keeps every task and cancel."""

    def __init__(self, context: zmq.asyncio.Context, registry: NodeRegistry, info: NodeInfo) -> None:
        self._server = ControlServer.bind(context, "tcp://127.0.0.1:0")
        self._registry = registry
        self.info = dataclasses.replace(info, control_endpoint=self._server.endpoint)
        self.script: Script = faithful_to_each_branch
        self.heard: list[ToNode] = []
        self.heard_more = asyncio.Event()
        self.answers_pings = True
        self.num_pings = 0
        # What it says it holds, to who gave it: all it was ever given, unless a test takes it away.
        self.held: list[str] = []
        self._givers: dict[str, Peer] = {}
        self.load = NodeLoad(
            ready=True,
            running=0,
            waiting=0,
            waiting_tokens=0,
            prefill_tokens_per_s=None,
            progress_age_s=0.0,
            blocks=BlockCounts(info.num_blocks, info.num_blocks, 0, 0, 0),
            transfer=TransferCounts(0, 0, 0, 0, 0),
        )

    @property
    def key(self) -> NodeKey:
        return NodeKey(self.info.node_id, self.info.incarnation)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._renew(), name="lease")
                while True:
                    peer, message = await self._server.recv()
                    if not isinstance(message, Ping):
                        self.heard.append(message)
                        if isinstance(message, PrefillTask | DecodeTask):
                            self.held.extend(message.task.attempt_ids)
                            self._givers |= dict.fromkeys(message.task.attempt_ids, peer)
                            # Not of a cancellation: a test that is slow may hear one for what has ended long ago.
                            tasks.create_task(self.script(self, peer, message), name="script")
                        elif isinstance(message, CancelTask) and message.attempt_id in self.held:
                            self.held.remove(message.attempt_id)
                        self.heard_more.set()
                        continue
                    self.num_pings += 1
                    if self.answers_pings:
                        await self._server.send(
                            peer, Pong(message.sequence, self.info, self.load, self._held_for(peer))
                        )
        finally:
            self._server.close()

    def _held_for(self, peer: Peer) -> tuple[str, ...]:
        return tuple(each for each in self.held if self._givers.get(each, peer) == peer)

    async def report(self, peer: Peer, task: GenerationTask, stage: Stage) -> None:
        await self._server.send(peer, StageReport(task.attempt_id, stage))

    async def fail(self, peer: Peer, task: GenerationTask, code: str, retryable: bool) -> None:
        await self._server.send(peer, TaskFailed(task.attempt_id, code, "as scripted", retryable))

    async def speak(self, peer: Peer, task: GenerationTask, start: int, end: int) -> None:
        """Say tokens [start, end), one a chunk; the last one allowed has the finish reason."""
        for position in range(start, end):
            is_last = position + 1 == task.sampling.max_tokens
            chunk = TokenChunk(
                attempt_id=task.attempt_id,
                start=position,
                token_ids=(token_at(task.prompt_token_ids, task.sampling.seed, position),),
                logprobs=None,
                finish_reason=FinishReason.LENGTH if is_last else None,
                num_cached_tokens=0 if position == len(task.output_token_ids) else None,
            )
            await self._server.send(peer, TokenBatch((chunk,)))

    def tasks(self) -> list[GenerationTask]:
        return [message.task for message in self.heard if isinstance(message, PrefillTask | DecodeTask)]

    def cancelled(self) -> list[str]:
        return [message.attempt_id for message in self.heard if isinstance(message, CancelTask)]

    async def until_heard(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.heard_more.clear()
                await self.heard_more.wait()

    async def _renew(self) -> None:
        while True:
            with contextlib.suppress(RedisUnavailable):
                await self._registry.renew(self.info)
            await asyncio.sleep(self._registry.lease_s / 4)


class Cluster:
    """A dispatch half with scripted nodes, all on one Redis; used as an async context manager inside a test."""

    def __init__(self, redis_url: str, context: zmq.asyncio.Context) -> None:
        self._redis_url = redis_url
        self.context = context
        self._running: dict[str, asyncio.Task[None]] = {}
        self.dispatch_config = DispatchConfig(migration_wait_s=30.0, gap_timeout_s=30.0)
        # A busy machine is no silent node: tests of silence and of what is forgotten set times of their own.
        self.pool_config = PoolConfig(poll_s=0.05, ping_s=0.05, silence_s=20.0, reconnect_s=0.1, forget_s=20.0)

    async def __aenter__(self) -> "Cluster":
        self.redis = connect(self._redis_url, timeout_s=30.0)
        keyspace = Keyspace("test")
        self.registry = NodeRegistry(self.redis, keyspace, lease_s=2.0)
        self.store = RequestStore(self.redis, keyspace)
        self.pool = NodePool(self.registry, self.context, self.pool_config, "gateway-1")
        self.recorder = RequestRecorder(self.store)
        self.dispatcher = Dispatcher(self.pool, self.store, self.recorder, self.dispatch_config, "gateway-1")
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._loops = [
            self._tasks.create_task(self.pool.run(), name="pool"),
            self._tasks.create_task(self.recorder.run(), name="recorder"),
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        for loop in (*self._loops, *self._running.values()):
            loop.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await self.redis.close()

    async def start(self, request: GenerationRequest) -> RunningGeneration:
        (generation,) = await self.dispatcher.start_branches([request])
        return generation

    def run_beside(self, loop: Coroutine[None, None, None]) -> None:
        self._loops.append(self._tasks.create_task(loop, name="beside"))

    async def add(self, role: NodeRole, node_id: str, **changes: object) -> ScriptedNode:
        node = self.launch(role, node_id, **changes)
        await self.until(lambda: self.pool.is_alive(node.key))
        return node

    def launch(self, role: NodeRole, node_id: str, **changes: object) -> ScriptedNode:
        info = NodeInfo(
            node_id=node_id,
            role=role,
            incarnation=secrets.token_hex(8),
            control_endpoint="",
            transfer_endpoint="tcp://127.0.0.1:9" if role is NodeRole.DECODE else None,
            model_name="tiny",
            model_digest="abc",
            max_model_len=128,
            block_size=4,
            num_blocks=256,
            version="0.1.0",
        )
        node = ScriptedNode(self.context, self.registry, dataclasses.replace(info, **changes))
        self._running[node_id] = self._tasks.create_task(node.run(), name=f"scripted {node_id}")
        return node

    async def pair(self) -> tuple[ScriptedNode, ScriptedNode]:
        """Add one prefill and one decode node."""
        return await self.add(NodeRole.PREFILL, "p1"), await self.add(NodeRole.DECODE, "d1")

    async def kill(self, node: ScriptedNode) -> None:
        """End a node as kill -9 does: its sockets close, its lease stays."""
        loop = self._running.pop(node.info.node_id)
        loop.cancel()
        await asyncio.wait((loop,))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await self.pool.wait_for_change(0.05)

    async def until_status(self, request_id: str, status: RequestStatus) -> RequestRecord:
        await self.recorder.flush(30)
        record = await self.store.get(request_id)
        assert record is not None
        assert record.status is status, record
        return record

    @staticmethod
    def request(max_tokens: int | None = 6, **changes: object) -> GenerationRequest:
        sampling = SamplingParams(max_tokens=max_tokens, seed=7)
        request = GenerationRequest(secrets.token_hex(8), tuple(range(1, 11)), sampling, timeout_s=60.0)
        return dataclasses.replace(request, **changes)

    @staticmethod
    def expected(request: GenerationRequest, num_tokens: int) -> tuple[int, ...]:
        seed = request.sampling.seed
        return tuple(token_at(request.prompt_token_ids, seed, position) for position in range(num_tokens))


@pytest.fixture
async def cluster(redis: RedisConnection, shared_redis: Any, context: zmq.asyncio.Context) -> Cluster:
    return Cluster(shared_redis.url, context)


@pytest.fixture
async def mortal_cluster(own_redis: Any, context: zmq.asyncio.Context) -> Cluster:
    """A cluster whose Redis (`own_redis`) may be killed."""
    return Cluster(own_redis.url, context)
