"""Branches of one prompt: one task to each node, each branch its own attempt, and its own request when it migrates."""

import asyncio
import dataclasses

import pytest

from pdserve.control.messages import DecodeTask, NodeRole, PrefillTask
from pdserve.control.request_state import RequestStatus
from pdserve.gateway.errors import AdmissionRefused
from pdserve.gateway.generation import GenerationRequest, Route
from pdserve.gateway.running_generation import RunningGeneration


def _branches(cluster, count: int, max_tokens: int = 6) -> list[GenerationRequest]:
    request = cluster.request(max_tokens=max_tokens)
    return [
        dataclasses.replace(
            request,
            request_id=f"{request.request_id}-{index}",
            sampling=dataclasses.replace(request.sampling, seed=20 + index),
        )
        for index in range(count)
    ]


async def _collect(generation: RunningGeneration) -> tuple[int, ...]:
    token_ids: tuple[int, ...] = ()
    async with generation:
        async for event in generation:
            token_ids += event.token_ids
    return token_ids


async def _all(generations: list[RunningGeneration]) -> list[tuple[int, ...]]:
    return list(await asyncio.gather(*map(_collect, generations)))


def _expected(cluster, requests: list[GenerationRequest], num_tokens: int = 6) -> list[tuple[int, ...]]:
    return [cluster.expected(request, num_tokens) for request in requests]


async def test_branches_are_one_task_on_each_node(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()
        requests = _branches(cluster, 4)

        outputs = await _all(await cluster.dispatcher.start_branches(requests))

        assert outputs == _expected(cluster, requests)
        (to_prefill,) = (message for message in prefill.heard if isinstance(message, PrefillTask))
        (to_decode,) = (message for message in decode.heard if isinstance(message, DecodeTask))
        assert to_prefill.task.attempt_ids == to_decode.task.attempt_ids
        assert sorted(to_decode.task.attempt_ids) == sorted(f"{request.request_id}:1" for request in requests)
        for request in requests:
            record = await cluster.until_status(request.request_id, RequestStatus.FINISHED)
            assert record.facts.route == "disaggregated"
        snapshot = cluster.dispatcher.snapshot()
        assert (snapshot.num_inflight, snapshot.routes[Route.DISAGGREGATED]) == (0, 4)


async def test_branch_that_ends_before_its_turn_is_cancelled_on_the_nodes(cluster) -> None:
    async with cluster:
        _, decode = await cluster.pair()
        requests = _branches(cluster, 3)
        first, second, third = await cluster.dispatcher.start_branches(requests)

        assert await _collect(first) == _expected(cluster, requests)[0]
        async with second:
            pass  # its attempt was begun by the first and never taken

        assert await _collect(third) == _expected(cluster, requests)[2]
        await decode.until_heard(lambda: f"{requests[1].request_id}:1" in decode.cancelled())
        await cluster.until_status(requests[1].request_id, RequestStatus.CANCELLED)
        assert cluster.dispatcher.snapshot().num_inflight == 0


async def test_branch_that_ends_before_any_begins_is_not_sent(cluster) -> None:
    async with cluster:
        _, decode = await cluster.pair()
        requests = _branches(cluster, 3)
        first, second, third = await cluster.dispatcher.start_branches(requests)
        async with first:
            pass

        assert await _all([second, third]) == _expected(cluster, requests)[1:]
        (task,) = decode.tasks()
        assert len(task.attempt_ids) == 2


async def test_branches_of_a_lost_node_go_on_each_by_itself(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()
        doomed = prefill.script

        async def half(node, peer, message) -> None:
            if isinstance(message, DecodeTask):
                for attempt_id, seed in [
                    (message.task.attempt_id, 20),
                    *((f.attempt_id, f.seed) for f in message.task.forks),
                ]:
                    sampling = dataclasses.replace(message.task.sampling, seed=seed)
                    branch = dataclasses.replace(message.task, attempt_id=attempt_id, sampling=sampling, forks=())
                    await node.speak(peer, branch, 1, 3)
                return
            await doomed(node, peer, message)

        decode.script = half
        requests = _branches(cluster, 3)
        generations = await cluster.dispatcher.start_branches(requests)
        collecting = asyncio.ensure_future(_all(generations))
        await cluster.until(lambda: all(generation.stats.num_output_tokens == 3 for generation in generations))

        other = await cluster.add(NodeRole.DECODE, "d2")
        await cluster.kill(decode)

        assert await collecting == _expected(cluster, requests)
        assert [generation.stats.route for generation in generations] == [Route.MIGRATED] * 3
        assert sorted(task.attempt_id for task in other.tasks()) == sorted(f"{r.request_id}:2" for r in requests)
        assert all(not task.forks and len(task.output_token_ids) == 3 for task in other.tasks())


async def test_branches_are_admitted_together_or_not_at_all(cluster) -> None:
    cluster.dispatch_config = dataclasses.replace(cluster.dispatch_config, max_inflight=2)
    async with cluster:
        await cluster.pair()
        requests = _branches(cluster, 3)

        with pytest.raises(AdmissionRefused):
            await cluster.dispatcher.start_branches(requests)

        assert cluster.dispatcher.snapshot().num_inflight == 0
        for request in requests[:2]:
            await cluster.until_status(request.request_id, RequestStatus.CANCELLED)
