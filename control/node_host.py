"""The part that every node process has in common: hear gateways, run one asyncio task for each task, report
load.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from pdserve.control.channel import ControlServer, Peer
from pdserve.control.errors import TaskError
from pdserve.control.messages import (
    CancelTask,
    DecodeTask,
    LinkReport,
    NodeInfo,
    NodeLoad,
    Ping,
    Pong,
    PrefillTask,
    ProbeLink,
    Stage,
    StageReport,
    TaskFailed,
    ToGateway,
    TokenChunk,
    ToNode,
)
from pdserve.control.task_branches import TaskBranches
from pdserve.engine.errors import EngineStopped, InvalidRequest

logger = logging.getLogger(__name__)

AnyTask = PrefillTask | DecodeTask


class Outbox:
    """Where one task's words go: to the gateway that asked for it. `branches` are the attempts that it still wants."""

    def __init__(self, server: ControlServer, peer: Peer, branches: TaskBranches) -> None:
        self._server = server
        self._peer = peer
        self.branches = branches

    async def send(self, message: ToGateway) -> None:
        """Send one message; a gateway that is gone is noticed by its silence, not here."""
        await self._server.send(self._peer, message)

    def say(self, chunk: TokenChunk) -> None:
        """Send tokens, in one message with what the same step has for the same gateway."""
        self._server.say(self._peer, chunk)

    async def report(self, stage: Stage) -> None:
        """Say of every attempt that it has reached `stage`."""
        for attempt_id in self.branches.open_ids:
            await self.send(StageReport(attempt_id, stage))


LoadReport = Callable[[bool], NodeLoad]  # is_draining -> load
RunTask = Callable[[AnyTask, Outbox], Awaitable[None]]
RunProbe = Callable[[ProbeLink], Awaitable[LinkReport]]  # says in the report what is wrong, within the probe's timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """Bounds of a NodeHost."""

    max_tasks: int
    gateway_lease_s: float


class NodeHost:
    """Owns the tasks of a node: each ends by itself, by cancel of all its attempts, by its own deadline, or with its
    gateway.

    `run_task` raises TaskError, InvalidRequest or EngineStopped for what the gateway must be told; anything
    else is a defect that ends that task alone, with a traceback in the log.
    """

    def __init__(
        self,
        server: ControlServer,
        info: NodeInfo,
        load: LoadReport,
        run_task: RunTask,
        limits: HostLimits,
        *,
        run_probe: RunProbe | None = None,
    ) -> None:
        self._server = server
        self._info = info
        self._load = load
        self._run_task = run_task
        self._limits = limits
        self._run_probe = run_probe
        self._probing: asyncio.Task[None] | None = None
        self._tasks: dict[str, _HostedTask] = {}  # by attempt: those of one task have it in common
        self._heard_at: dict[Peer, float] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    @property
    def num_tasks(self) -> int:
        """Attempts that have not ended."""
        return len(self._tasks)

    async def serve(self) -> None:
        """Hear gateways until cancelled; then every task is cancelled and has ended."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_gateways(), name="watch gateways")
                while True:
                    peer, message = await self._server.recv()
                    self._heard_at[peer] = time.monotonic()
                    await self._handle(peer, message)
        finally:
            await self._end_all()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new tasks and wait for the running ones; return whether all have ended in time."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _handle(self, peer: Peer, message: ToNode) -> None:
        match message:
            case Ping():
                load = self._load(self.is_draining)
                load = replace(load, malformed=self._server.num_malformed, refused_connections=self._server.num_refused)
                await self._server.send(peer, Pong(message.sequence, self._info, load, self._attempts_of(peer)))
            case ProbeLink():
                await self._start_probe(peer, message)
            case PrefillTask() | DecodeTask():
                await self._start(peer, message)
            case CancelTask():
                self._cancel(message.attempt_id, message.reason)

    async def _start_probe(self, peer: Peer, probe: ProbeLink) -> None:
        """Measure a link beside the tasks, one at a time."""
        refusal: LinkReport | None = None
        if self._run_probe is None:
            refusal = LinkReport(probe.probe_id, "invalid_request", "only a prefill node measures links")
        elif self._probing is not None and not self._probing.done():
            refusal = LinkReport(probe.probe_id, "overloaded", "this node is measuring another link")
        else:
            measuring = self._measure(peer, probe, self._run_probe)
            self._probing = asyncio.create_task(measuring, name=f"probe {probe.probe_id}")
        if refusal is not None:
            await self._server.send(peer, refusal)

    async def _measure(self, peer: Peer, probe: ProbeLink, run_probe: RunProbe) -> None:
        try:
            report = await run_probe(probe)
        except Exception:
            logger.exception("probe %s failed", probe.probe_id)
            report = LinkReport(probe.probe_id, "engine_error", "internal error; the node's log has the traceback")
        await self._server.send(peer, report)

    async def _start(self, peer: Peer, task: AnyTask) -> None:
        attempt_ids = task.task.attempt_ids
        outbox = Outbox(self._server, peer, TaskBranches(attempt_ids))
        if refusal := self._refusal(attempt_ids):
            await _fail(outbox, refusal)
            return
        running = asyncio.create_task(self._run(task, outbox), name=f"task {attempt_ids[0]}")
        self._tasks.update(dict.fromkeys(attempt_ids, _HostedTask(running, outbox.branches, peer)))
        self._idle.clear()
        # Not in a `finally` of the task: one that is cancelled before its first step never enters it.
        running.add_done_callback(lambda _: self._forget(attempt_ids))

    def _refusal(self, attempt_ids: tuple[str, ...]) -> TaskError | None:
        if self.is_draining:
            return TaskError("draining", f"node {self._info.node_id} is shutting down", retryable=True)
        if len(self._tasks) >= self._limits.max_tasks:
            return TaskError("overloaded", f"node {self._info.node_id} has {len(self._tasks)} tasks", retryable=True)
        for attempt_id in attempt_ids:
            if attempt_id in self._tasks:
                return TaskError("invalid_request", f"attempt {attempt_id} is running already", retryable=False)
        if len(set(attempt_ids)) < len(attempt_ids):
            return TaskError("invalid_request", "two branches have the same attempt", retryable=False)
        return None

    async def _run(self, task: AnyTask, outbox: Outbox) -> None:
        failure = await self._outcome(task, outbox)
        if failure is not None:
            logger.info("attempt failed: %s", failure, extra={"request_id": task.task.request_id})
            await _fail(outbox, failure)

    def _forget(self, attempt_ids: tuple[str, ...]) -> None:
        for attempt_id in attempt_ids:
            del self._tasks[attempt_id]
        if not self._tasks:
            self._idle.set()

    async def _outcome(self, task: AnyTask, outbox: Outbox) -> TaskError | None:
        """Run the task and return why it failed, or None."""
        generation = task.task
        try:
            async with asyncio.timeout(generation.timeout_s):
                await self._run_task(task, outbox)
        except TaskError as error:
            return error
        except InvalidRequest as error:
            return TaskError("invalid_request", str(error), retryable=False)
        except EngineStopped as error:
            return TaskError("engine_error", str(error), retryable=True)
        except TimeoutError:
            return TaskError("deadline", f"not finished within {generation.timeout_s:g} s", retryable=False)
        except Exception:
            logger.exception("attempt failed", extra={"request_id": generation.request_id})
            return TaskError("engine_error", "internal error; the node's log has the traceback", retryable=False)
        return None

    def _cancel(self, attempt_id: str, reason: str) -> None:
        hosted = self._tasks.get(attempt_id)
        if hosted is not None and hosted.branches.is_open(attempt_id):
            logger.debug("attempt %s cancelled: %s", attempt_id, reason)
            hosted.branches.cancel(attempt_id)
            if not hosted.branches.open_ids:
                hosted.running.cancel()

    async def _watch_gateways(self) -> None:
        lease_s = self._limits.gateway_lease_s
        while True:
            before = time.monotonic()
            await asyncio.sleep(lease_s / 4)
            now = time.monotonic()
            if now - before > lease_s * 3 / 4:
                continue  # this process was stalled: read what gateways said before judging them
            deadline = now - lease_s
            for peer in [peer for peer, heard_at in self._heard_at.items() if heard_at < deadline]:
                del self._heard_at[peer]
                self._end_gateway(peer)

    def _end_gateway(self, peer: Peer) -> None:
        attempt_ids = self._attempts_of(peer)
        if attempt_ids:
            logger.warning("a gateway has gone silent; cancelling its %d tasks", len(attempt_ids))
        for attempt_id in attempt_ids:
            self._cancel(attempt_id, "the gateway has gone silent")

    def _attempts_of(self, peer: Peer) -> tuple[str, ...]:
        return tuple(
            attempt_id
            for attempt_id, hosted in self._tasks.items()
            if hosted.peer == peer and hosted.branches.is_open(attempt_id)
        )

    async def _end_all(self) -> None:
        tasks = {hosted.running for hosted in self._tasks.values()}
        if self._probing is not None:
            tasks.add(self._probing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _fail(outbox: Outbox, failure: TaskError) -> None:
    """Tell the gateway of every attempt that is still wanted that it has failed."""
    for attempt_id in outbox.branches.open_ids:
        await outbox.send(TaskFailed(attempt_id, failure.code, failure.message, failure.retryable))


@dataclass(frozen=True, slots=True)
class _HostedTask:
    """What runs, for which attempts, for which gateway."""

    running: asyncio.Task[None]
    branches: TaskBranches
    peer: Peer
