"""A NodeHost behind real sockets, with a task body that a test steers."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable

import pytest
import zmq.asyncio

from pdserve.control.channel import ControlClient, ControlServer
from pdserve.control.errors import TaskError
from pdserve.control.messages import (
    BlockCounts,
    CancelTask,
    DecodeTask,
    Fork,
    GenerationTask,
    LinkReport,
    NodeInfo,
    NodeLoad,
    NodeRole,
    Ping,
    Pong,
    ProbeLink,
    Stage,
    StageReport,
    TaskFailed,
    ToGateway,
    ToNode,
    TransferCounts,
)
from pdserve.control.node_host import AnyTask, HostLimits, NodeHost, Outbox
from pdserve.engine.errors import EngineStopped, InvalidRequest
from pdserve.engine.sampling_params import SamplingParams

INFO = NodeInfo("d1", NodeRole.DECODE, "i1", "tcp://h:1", "tcp://h:2", "m", "digest", 512, 16, 9, "0.1.0")


def _load(is_draining: bool) -> NodeLoad:
    return NodeLoad(not is_draining, 0, 0, 0, None, 0.0, BlockCounts(9, 9, 0, 0, 0), TransferCounts(0, 0, 0, 0, 0))


def _task(attempt_id: str, timeout_s: float = 30.0) -> DecodeTask:
    sampling = SamplingParams(max_tokens=1, seed=1)
    return DecodeTask(GenerationTask("r", attempt_id, (1, 2), (), sampling, "", timeout_s), None)


class Body:
    """The task body: reports that it runs, then does what the attempt id says. `held` is what has not ended."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.go_on = asyncio.Event()
        self.changed = asyncio.Event()

    async def run(self, task: AnyTask, outbox: Outbox) -> None:
        attempt_id = task.task.attempt_id
        self.held.add(attempt_id)
        try:
            await outbox.send(StageReport(attempt_id, Stage.DECODING))
            match attempt_id.partition("-")[0]:
                case "waits":
                    await self.go_on.wait()
                case "task_error":
                    raise TaskError("no_blocks", "as scripted", retryable=True)
                case "invalid":
                    raise InvalidRequest("prompt", "as scripted")
                case "stopped":
                    raise EngineStopped("as scripted")
                case "defect":
                    raise ZeroDivisionError
        finally:
            self.held.discard(attempt_id)
            self.changed.set()

    async def probe(self, probe: ProbeLink) -> LinkReport:
        self.held.add(probe.probe_id)
        try:
            if probe.probe_id == "defect":
                raise ZeroDivisionError
            await self.go_on.wait()
            return LinkReport(probe.probe_id, None, "")
        finally:
            self.held.discard(probe.probe_id)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Gateway:
    """One gateway's end of the channel."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client

    def send(self, message: ToNode) -> None:
        self._client.send(message)

    async def ask(self, message: ToNode) -> ToGateway:
        """Send, and return the next thing that the node says."""
        self.send(message)
        return await self.hear()

    async def hear(self) -> ToGateway:
        async with asyncio.timeout(30):
            return await self._client.recv()

    async def held_after_reports(self) -> tuple[str, ...]:
        """Return what the node holds, passing over what its tasks report before that."""
        self.send(Ping("g", 2))
        while not isinstance(answer := await self.hear(), Pong):
            assert isinstance(answer, StageReport), answer
        return answer.attempt_ids

    async def held(self) -> tuple[str, ...]:
        answer = await self.ask(Ping("g", 1))
        assert isinstance(answer, Pong), answer
        return answer.attempt_ids

    def close(self) -> None:
        self._client.close()


class Node:
    """A serving host and as many gateways as a test opens."""

    def __init__(self, context: zmq.asyncio.Context, server: ControlServer, limits: HostLimits) -> None:
        self.body = Body()
        self.host = NodeHost(server, INFO, _load, self.body.run, limits, run_probe=self.body.probe)
        self._context = context
        self._endpoint = server.endpoint
        self._gateways: list[Gateway] = []

    def gateway(self) -> Gateway:
        self._gateways.append(Gateway(ControlClient.connect(self._context, self._endpoint)))
        return self._gateways[-1]

    def close(self) -> None:
        for gateway in self._gateways:
            gateway.close()


@contextlib.asynccontextmanager
async def _serving(
    context: zmq.asyncio.Context, max_tasks: int = 8, gateway_lease_s: float = 30.0
) -> AsyncIterator[Node]:
    server = ControlServer.bind(context, "tcp://127.0.0.1:0")
    node = Node(context, server, HostLimits(max_tasks=max_tasks, gateway_lease_s=gateway_lease_s))
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(node.host.serve(), name="serve")
            yield node
            serving.cancel()
        assert (node.host.num_tasks, node.body.held) == (0, set())
    finally:
        node.close()
        server.close()


async def test_a_pong_names_what_the_node_holds_for_the_gateway_that_asks(context: zmq.asyncio.Context) -> None:
    async with _serving(context) as node:
        mine, other = node.gateway(), node.gateway()
        await mine.ask(_task("waits-1"))
        await other.ask(_task("waits-2"))

        answer = await mine.ask(Ping("g", 7))

        assert answer == Pong(7, INFO, _load(False), ("waits-1",))
        assert await other.held() == ("waits-2",)
        node.body.go_on.set()
        await node.body.until(lambda: not node.body.held)
        assert await mine.held() == ()


async def test_a_task_cancelled_before_its_first_step_is_forgotten(context: zmq.asyncio.Context) -> None:
    async with _serving(context, max_tasks=3) as node:
        gateway = node.gateway()
        for round_number in range(20):  # what is sent together is, as a rule, read in one turn of the node's loop
            attempt_id = f"waits-{round_number}"
            gateway.send(_task(attempt_id))
            gateway.send(CancelTask(attempt_id, "the client left"))

            assert await gateway.held_after_reports() == ()

        await asyncio.wait_for(node.host.drain(30), 60)
        assert node.host.num_tasks == 0


@pytest.mark.parametrize(
    ("kind", "code", "retryable"),
    [
        ("task_error", "no_blocks", True),
        ("invalid", "invalid_request", False),
        ("stopped", "engine_error", True),
        ("defect", "engine_error", False),
    ],
)
async def test_whatever_ends_a_task_ends_that_task_alone(
    context: zmq.asyncio.Context, kind: str, code: str, retryable: bool
) -> None:
    async with _serving(context) as node:
        gateway = node.gateway()
        await gateway.ask(_task("waits"))

        await gateway.ask(_task(kind))
        failure = await gateway.hear()

        assert isinstance(failure, TaskFailed)
        assert (failure.attempt_id, failure.code, failure.retryable) == (kind, code, retryable)
        assert await gateway.held() == ("waits",)


async def test_more_tasks_than_the_bound_are_refused_until_one_has_ended(context: zmq.asyncio.Context) -> None:
    async with _serving(context, max_tasks=2) as node:
        gateway = node.gateway()
        await gateway.ask(_task("waits-1"))
        await gateway.ask(_task("waits-2"))

        refusal = await gateway.ask(_task("waits-3"))

        assert isinstance(refusal, TaskFailed)
        assert (refusal.attempt_id, refusal.code, refusal.retryable) == ("waits-3", "overloaded", True)
        node.body.go_on.set()
        await node.body.until(lambda: not node.body.held)
        assert await gateway.held() == ()
        assert await gateway.ask(_task("waits-4")) == StageReport("waits-4", Stage.DECODING)


async def test_an_attempt_id_runs_once_at_a_time(context: zmq.asyncio.Context) -> None:
    async with _serving(context) as node:
        gateway = node.gateway()
        await gateway.ask(_task("waits"))

        refusal = await gateway.ask(_task("waits"))

        assert isinstance(refusal, TaskFailed)
        assert (refusal.code, refusal.retryable) == ("invalid_request", False)
        assert await gateway.held() == ("waits",)


async def test_a_cancel_ends_one_task_without_a_word_and_unknown_ids_are_ignored(context: zmq.asyncio.Context) -> None:
    async with _serving(context) as node:
        gateway = node.gateway()
        await gateway.ask(_task("waits-1"))
        await gateway.ask(_task("waits-2"))

        for attempt_id in ("unknown", "waits-1", "waits-1"):
            gateway.send(CancelTask(attempt_id, "test"))
        await node.body.until(lambda: node.body.held == {"waits-2"})

        assert await gateway.held() == ("waits-2",)


async def test_a_task_that_outlives_its_time_is_ended_and_said_to_be_late(context: zmq.asyncio.Context) -> None:
    async with _serving(context) as node:
        gateway = node.gateway()
        await gateway.ask(_task("waits", timeout_s=0.02))

        failure = await gateway.hear()

        assert isinstance(failure, TaskFailed)
        assert (failure.attempt_id, failure.code, failure.retryable) == ("waits", "deadline", False)
        assert not node.body.held


async def test_the_tasks_of_a_silent_gateway_are_cancelled_those_of_a_speaking_one_go_on(
    context: zmq.asyncio.Context,
) -> None:
    async with _serving(context, gateway_lease_s=2.0) as node:
        silent, speaking = node.gateway(), node.gateway()
        await silent.ask(_task("waits-silent"))
        await speaking.ask(_task("waits-speaking"))

        async with asyncio.timeout(30):
            while "waits-silent" in node.body.held:
                await speaking.held()

        assert await speaking.held() == ("waits-speaking",)
        assert await silent.held() == ()  # it may come back


async def test_a_node_that_stood_still_does_not_take_its_gateways_for_silent(context: zmq.asyncio.Context) -> None:
    async with _serving(context, gateway_lease_s=1.0) as node:
        gateway = node.gateway()
        await gateway.ask(_task("waits"))

        for number in range(3):
            gateway.send(Ping("g", number))  # what it says is there to be read when the node goes on
            time.sleep(1.6)  # noqa: ASYNC251 - the whole event loop stands still, as under a long native call
            answer = await gateway.hear()
            assert isinstance(answer, Pong) and answer.attempt_ids == ("waits",)


async def test_a_draining_node_refuses_what_is_new_and_waits_for_what_runs(context: zmq.asyncio.Context) -> None:
    async with _serving(context) as node:
        gateway = node.gateway()
        await gateway.ask(_task("waits-1"))
        draining = asyncio.ensure_future(node.host.drain(60.0))
        answer = await gateway.ask(Ping("g", 1))

        refusal = await gateway.ask(_task("waits-2"))

        assert isinstance(answer, Pong) and not answer.load.ready
        assert isinstance(refusal, TaskFailed)
        assert (refusal.code, refusal.retryable) == ("draining", True)
        assert not draining.done()
        node.body.go_on.set()
        assert await draining


async def test_draining_ends_at_its_time(context: zmq.asyncio.Context) -> None:
    async with _serving(context) as node:
        await node.gateway().ask(_task("waits"))

        assert not await node.host.drain(0.01)


def _forked(*attempt_ids: str) -> DecodeTask:
    task = _task(attempt_ids[0]).task
    forks = tuple(Fork(attempt_id, seed) for seed, attempt_id in enumerate(attempt_ids[1:]))
    return DecodeTask(dataclasses.replace(task, forks=forks), None)


async def test_a_branch_is_cancelled_alone_and_the_last_one_ends_the_task(context: zmq.asyncio.Context) -> None:
    async with _serving(context) as node:
        gateway = node.gateway()
        await gateway.ask(_forked("waits-1", "b", "c"))
        assert await gateway.held() == ("waits-1", "b", "c")

        gateway.send(CancelTask("waits-1", "test"))
        assert await gateway.held() == ("b", "c")
        assert node.body.held == {"waits-1"}  # the task goes on for the others

        gateway.send(CancelTask("b", "test"))
        gateway.send(CancelTask("c", "test"))
        await node.body.until(lambda: not node.body.held)
        assert await gateway.held() == ()


async def test_what_fails_a_task_is_said_of_each_branch_that_is_wanted(context: zmq.asyncio.Context) -> None:
    async with _serving(context) as node:
        gateway = node.gateway()
        await gateway.ask(_forked("waits-1", "b", "c"))

        for clashing in (_forked("new", "b"), _forked("twin", "twin")):
            refusals = (
                [await gateway.ask(clashing), await gateway.hear()]
                if clashing.task.attempt_id == "new"
                else [await gateway.ask(clashing)]
            )
            assert all(isinstance(refusal, TaskFailed) and not refusal.retryable for refusal in refusals)
        assert await gateway.ask(_forked("task_error", "d")) == StageReport("task_error", Stage.DECODING)
        failures = [await gateway.hear(), await gateway.hear()]

        assert [failure.attempt_id for failure in failures if isinstance(failure, TaskFailed)] == ["task_error", "d"]
        assert await gateway.held() == ("waits-1", "b", "c")


def _probe(probe_id: str) -> ProbeLink:
    return ProbeLink(probe_id, "tcp://127.0.0.1:1", "d", "i", 1, 1.0)


async def test_one_link_is_measured_at_a_time_beside_the_tasks(context: zmq.asyncio.Context) -> None:
    async with _serving(context) as node:
        gateway = node.gateway()
        gateway.send(_probe("first"))
        refused = await gateway.ask(_probe("second"))
        assert isinstance(refused, LinkReport) and (refused.probe_id, refused.code) == ("second", "overloaded")
        assert await gateway.held() == ()
        node.body.go_on.set()
        first = await gateway.hear()
        assert isinstance(first, LinkReport) and (first.probe_id, first.code) == ("first", None)

        third = await gateway.ask(_probe("third"))
        assert isinstance(third, LinkReport) and third.code is None


async def test_a_probe_that_fails_by_a_defect_is_answered_and_one_that_runs_ends_with_the_node(
    context: zmq.asyncio.Context,
) -> None:
    async with _serving(context) as node:
        gateway = node.gateway()
        report = await gateway.ask(_probe("defect"))
        assert isinstance(report, LinkReport) and report.code == "engine_error"
        gateway.send(_probe("endless"))
        await gateway.held()
        assert node.body.held == {"endless"}


async def test_a_pong_counts_what_the_node_could_not_read(context: zmq.asyncio.Context) -> None:
    async with _serving(context) as node:
        gateway = node.gateway()
        await gateway._client._socket.send(b"garbage")

        pong = await gateway.ask(Ping("g", 1))

        assert isinstance(pong, Pong) and pong.load.malformed == 1
