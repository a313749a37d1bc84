"""The dispatcher against scripted nodes on real sockets and a real Redis."""

import asyncio
import dataclasses
import time

import pytest

from pdserve.control.messages import DecodeTask, FinishReason, NodeRole, PrefillTask, Stage
from pdserve.control.request_state import RequestStatus
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.sampling_params import SamplingParams
from pdserve.gateway.errors import AdmissionRefused, GenerationFailed
from pdserve.gateway.generation import Route


async def _collect(generation) -> tuple[tuple[int, ...], FinishReason | None]:
    token_ids: tuple[int, ...] = ()
    finish_reason = None
    async with generation:
        async for event in generation:
            assert event.start == len(token_ids)
            assert finish_reason is None
            token_ids += event.token_ids
            finish_reason = event.finish_reason
    return token_ids, finish_reason


async def test_both_nodes_make_one_output(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()
        request = cluster.request()

        generation = await cluster.start(request)
        token_ids, finish_reason = await _collect(generation)

        assert token_ids == cluster.expected(request, 6)
        assert finish_reason is FinishReason.LENGTH
        stats = generation.stats
        assert (stats.route, stats.prefill_node_id, stats.decode_node_id) == (Route.DISAGGREGATED, "p1", "d1")
        assert (stats.num_attempts, stats.num_output_tokens, stats.num_cached_tokens) == (1, 6, 0)
        assert stats.timings.first_token_ms is not None and stats.timings.ended_ms is not None
        record = await cluster.until_status(request.request_id, RequestStatus.FINISHED)
        assert record.facts.route == "disaggregated"
        assert record.facts.finish_reason == "length"
        snapshot = cluster.dispatcher.snapshot()
        assert snapshot.requests[RequestStatus.FINISHED] == 1
        assert snapshot.routes[Route.DISAGGREGATED] == 1
        assert snapshot.num_inflight == 0
        assert prefill.heard[0].transfer_id == decode.heard[0].transfer_id
        assert prefill.heard[0].decode_incarnation == decode.info.incarnation


async def test_a_decode_node_that_overtakes_waits_for_the_first_token(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()
        plain = prefill.script

        async def after_the_decode_node(node, peer, message) -> None:
            await decode.until_heard(lambda: decode.tasks())
            await asyncio.sleep(0.05)
            await plain(node, peer, message)

        prefill.script = after_the_decode_node
        request = cluster.request()

        token_ids, _ = await _collect(await cluster.start(request))

        assert token_ids == cluster.expected(request, 6)
        assert cluster.dispatcher.snapshot().num_attempts == 1


async def test_a_first_token_that_ends_the_request_releases_the_decode_node(cluster) -> None:
    async with cluster:
        _, decode = await cluster.pair()

        async def silent(node, peer, message) -> None:
            return

        decode.script = silent
        request = cluster.request(max_tokens=1)

        token_ids, finish_reason = await _collect(await cluster.start(request))

        assert token_ids == cluster.expected(request, 1)
        assert finish_reason is FinishReason.LENGTH
        await decode.until_heard(lambda: decode.cancelled())
        record = await cluster.until_status(request.request_id, RequestStatus.FINISHED)
        assert [entry.status.value for entry in record.story] == ["queued", "prefilling", "finished"]


async def test_without_a_prefill_node_the_decode_node_does_all(cluster) -> None:
    async with cluster:
        decode = await cluster.add(NodeRole.DECODE, "d1")
        request = cluster.request()

        generation = await cluster.start(request)
        token_ids, _ = await _collect(generation)

        assert token_ids == cluster.expected(request, 6)
        assert decode.heard[0].transfer_id is None
        assert generation.stats.route is Route.LOCAL
        assert cluster.dispatcher.snapshot().routes[Route.LOCAL] == 1


@pytest.mark.parametrize(("num_prefill", "planned"), [(0, Route.LOCAL), (1, Route.DISAGGREGATED)])
async def test_the_planned_route_is_the_one_that_is_taken(cluster, num_prefill: int, planned: Route) -> None:
    async with cluster:
        await cluster.add(NodeRole.DECODE, "d1")
        for number in range(num_prefill):
            await cluster.add(NodeRole.PREFILL, f"p{number}")
        request = cluster.request()

        generation = await cluster.start(request)
        routes = [generation.planned_route(), generation.planned_route()]
        token_ids, _ = await _collect(generation)

        assert routes == [planned, planned] and generation.stats.route is planned
        assert token_ids == cluster.expected(request, 6) and generation.stats.num_attempts == 1


async def test_a_plan_whose_node_is_lost_before_the_start_is_made_again(cluster) -> None:
    async with cluster:
        prefill, _ = await cluster.pair()
        request = cluster.request()

        generation = await cluster.start(request)
        planned = generation.planned_route()
        await cluster.kill(prefill)
        await cluster.until(lambda: all(view.is_decode for view in cluster.pool.views()))
        token_ids, _ = await _collect(generation)

        assert planned is Route.DISAGGREGATED
        assert token_ids == cluster.expected(request, 6) and generation.stats.route is not Route.DISAGGREGATED


async def test_without_limit_or_seed_both_are_fixed_at_admission(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()
        request = cluster.request(sampling=SamplingParams(max_tokens=None))

        generation = await cluster.start(request)
        token_ids, _ = await _collect(generation)

        (prefill_task,), (decode_task,) = prefill.tasks(), decode.tasks()
        assert prefill_task.sampling == decode_task.sampling
        assert decode_task.sampling.max_tokens == len(token_ids) == 128 - 10
        assert decode_task.sampling.seed == generation.stats.seed


@pytest.mark.parametrize("num_before", [0, 1, 3])
async def test_a_killed_decode_node_is_replaced_without_a_seam(cluster, num_before: int) -> None:
    async with cluster:
        prefill, first = await cluster.pair()

        async def stops_midway(node, peer, message) -> None:
            if isinstance(message, DecodeTask) and num_before > 1:
                await node.report(peer, message.task, Stage.DECODING)
                await node.speak(peer, message.task, 1, num_before)

        first.script = stops_midway
        plain = prefill.script

        async def stays_silent_at_first(node, peer, message) -> None:
            if num_before > 0 or (isinstance(message, PrefillTask) and message.decode_node_id != "d1"):
                await plain(node, peer, message)

        prefill.script = stays_silent_at_first
        request = cluster.request()
        events = []

        async with await cluster.start(request) as generation:
            async with asyncio.timeout(50):
                while sum(len(event.token_ids) for event in events) < num_before:
                    events.append(await anext(generation))
                if num_before == 0:
                    waiting = asyncio.ensure_future(anext(generation))
                    await first.until_heard(lambda: first.tasks())
                second = await cluster.add(NodeRole.DECODE, "d2")
                await cluster.kill(first)
                if num_before == 0:
                    events.append(await waiting)
                events += [event async for event in generation]

        token_ids = sum((event.token_ids for event in events), ())
        assert token_ids == cluster.expected(request, 6)
        assert generation.stats.route is Route.MIGRATED
        assert generation.stats.num_attempts == 2
        (task,) = second.tasks()
        assert task.output_token_ids == token_ids[:num_before]
        assert task.attempt_id == f"{request.request_id}:2"
        assert f"{request.request_id}:1" in prefill.cancelled()
        record = await cluster.until_status(request.request_id, RequestStatus.FINISHED)
        assert record.facts.num_attempts == 2
        assert cluster.dispatcher.snapshot().routes[Route.MIGRATED] == 1


async def test_a_prefill_node_lost_before_the_first_token_is_replaced(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()
        plain = decode.script

        async def silent(node, peer, message) -> None:
            return

        prefill.script = decode.script = silent
        request = cluster.request()

        async with await cluster.start(request) as generation:
            waiting = asyncio.ensure_future(anext(generation))
            await prefill.until_heard(lambda: prefill.tasks())
            await decode.until_heard(lambda: decode.tasks())
            decode.script = plain
            await cluster.kill(prefill)
            events = [await waiting] + [event async for event in generation]

        assert sum((event.token_ids for event in events), ()) == cluster.expected(request, 6)
        assert decode.heard[-1].transfer_id is None
        assert f"{request.request_id}:1" in decode.cancelled()


async def test_a_prefill_node_lost_after_the_hand_over_is_no_loss(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()
        go_on = asyncio.Event()

        async def pauses(node, peer, message) -> None:
            await node.report(peer, message.task, Stage.DECODING)
            await node.speak(peer, message.task, 1, 3)
            await go_on.wait()
            await node.speak(peer, message.task, 3, 6)

        decode.script = pauses
        request = cluster.request()

        async with await cluster.start(request) as generation:
            token_ids: tuple[int, ...] = ()
            while len(token_ids) < 3:
                token_ids += (await anext(generation)).token_ids
            await cluster.kill(prefill)
            await cluster.until(lambda: not cluster.pool.is_alive(prefill.key))
            go_on.set()
            async for event in generation:
                token_ids += event.token_ids

        assert token_ids == cluster.expected(request, 6)
        assert generation.stats.num_attempts == 1


async def test_a_hung_node_is_a_lost_node(cluster) -> None:
    cluster.pool_config = dataclasses.replace(cluster.pool_config, silence_s=0.5)
    async with cluster:
        _prefill, first = await cluster.pair()

        async def hangs(node, peer, message) -> None:
            node.answers_pings = False

        first.script = hangs
        request = cluster.request()

        async with await cluster.start(request) as generation:
            token_ids = (await anext(generation)).token_ids
            await cluster.add(NodeRole.DECODE, "d2")
            async for event in generation:
                token_ids += event.token_ids

        assert token_ids == cluster.expected(request, 6)
        assert generation.stats.decode_node_id == "d2"


async def test_a_gateway_that_stood_still_does_not_take_its_nodes_for_lost(cluster) -> None:
    """Under a long call into native code nothing is read: what the nodes said meanwhile counts before their silence.
    Where all stood still, as on a machine that was frozen, a node has its whole time to answer again."""
    cluster.pool_config = dataclasses.replace(cluster.pool_config, silence_s=2.0)
    async with cluster:
        _, decode = await cluster.pair()
        go_on = asyncio.Event()

        async def pauses(node, peer, message) -> None:
            await node.speak(peer, message.task, 1, 3)
            await go_on.wait()
            await node.speak(peer, message.task, 3, 6)

        decode.script = pauses
        request = cluster.request()

        async with await cluster.start(request) as generation:
            token_ids: tuple[int, ...] = ()
            while len(token_ids) < 3:
                token_ids += (await anext(generation)).token_ids
            decode.load = dataclasses.replace(decode.load, running=7)
            decode.answers_pings = False
            time.sleep(2 * cluster.pool_config.silence_s)  # noqa: ASYNC251 - the whole event loop stands still
            num_pings = decode.num_pings
            await cluster.until(lambda: decode.num_pings >= num_pings + 4)
            decode.answers_pings = True
            await cluster.until(lambda: any(view.load and view.load.running == 7 for view in cluster.pool.views()))
            go_on.set()
            async for event in generation:
                token_ids += event.token_ids

        assert token_ids == cluster.expected(request, 6)
        assert generation.stats.num_attempts == 1


async def test_without_another_decode_node_the_client_hears_it_soon(cluster) -> None:
    cluster.dispatch_config = dataclasses.replace(cluster.dispatch_config, migration_wait_s=0.5)
    async with cluster:
        prefill, decode = await cluster.pair()

        async def silent(node, peer, message) -> None:
            return

        decode.script = silent
        request = cluster.request()

        async with await cluster.start(request) as generation:
            await anext(generation)
            await cluster.kill(decode)
            with pytest.raises(GenerationFailed) as caught:
                await anext(generation)

        assert caught.value.code == "node_lost"
        assert caught.value.retryable
        await prefill.until_heard(lambda: prefill.cancelled())
        record = await cluster.until_status(request.request_id, RequestStatus.FAILED)
        assert record.facts.error_code == "node_lost"
        assert cluster.dispatcher.snapshot().requests[RequestStatus.FAILED] == 1


async def test_a_retryable_failure_is_tried_elsewhere_and_a_final_one_is_not(cluster) -> None:
    async with cluster:
        await cluster.add(NodeRole.PREFILL, "p1")
        first = await cluster.add(NodeRole.DECODE, "d1")
        second = await cluster.add(NodeRole.DECODE, "d2")

        async def is_full(node, peer, message) -> None:
            if isinstance(message, DecodeTask):
                await node.fail(peer, message.task, "no_blocks", retryable=True)

        async def is_broken(node, peer, message) -> None:
            if isinstance(message, DecodeTask):
                await node.fail(peer, message.task, "engine_error", retryable=False)

        first.script = is_full
        request = cluster.request()
        token_ids, _ = await _collect(await cluster.start(request))
        assert token_ids == cluster.expected(request, 6)
        assert second.tasks()

        first.script = second.script = is_broken
        with pytest.raises(GenerationFailed) as caught:
            await _collect(await cluster.start(cluster.request()))
        assert caught.value.code == "engine_error"
        assert not caught.value.retryable


async def test_where_blocks_cannot_travel_the_decode_node_does_all(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()
        plain = decode.script

        async def cannot_send(node, peer, message) -> None:
            if isinstance(message, PrefillTask):
                await node.fail(peer, message.task, "transfer_failed", retryable=False)

        async def gets_nothing(node, peer, message) -> None:
            if not isinstance(message, DecodeTask) or message.transfer_id is None:
                await plain(node, peer, message)

        prefill.script, decode.script = cannot_send, gets_nothing
        request = cluster.request()

        generation = await cluster.start(request)
        token_ids, _ = await _collect(generation)

        assert token_ids == cluster.expected(request, 6)
        assert generation.stats.prefill_node_id is None
        assert len(prefill.tasks()) == 1


async def test_attempts_are_limited(cluster) -> None:
    async with cluster:
        _, decode = await cluster.pair()

        async def is_full(node, peer, message) -> None:
            if isinstance(message, DecodeTask):
                await node.fail(peer, message.task, "no_blocks", retryable=True)

        decode.script = is_full

        with pytest.raises(GenerationFailed) as caught:
            await _collect(await cluster.start(cluster.request()))

        assert caught.value.code == "no_blocks"
        assert len(decode.tasks()) == 3


async def test_a_chunk_that_never_comes_is_a_failed_attempt(cluster) -> None:
    cluster.dispatch_config = dataclasses.replace(cluster.dispatch_config, gap_timeout_s=2.0)
    async with cluster:
        _, first = await cluster.pair()

        async def skips(node, peer, message) -> None:
            if isinstance(message, DecodeTask):
                await node.speak(peer, message.task, 2, 3)

        first.script = skips
        await cluster.add(NodeRole.DECODE, "d2")
        request = cluster.request()

        token_ids, _ = await _collect(await cluster.start(request))

        assert token_ids == cluster.expected(request, 6)


async def test_leaving_cancels_on_both_nodes_at_once(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()

        async def silent(node, peer, message) -> None:
            return

        decode.script = silent
        request = cluster.request()

        async with await cluster.start(request) as generation:
            await anext(generation)

        attempt_id = f"{request.request_id}:1"
        await prefill.until_heard(lambda: attempt_id in prefill.cancelled())
        await decode.until_heard(lambda: attempt_id in decode.cancelled())
        await cluster.until_status(request.request_id, RequestStatus.CANCELLED)
        snapshot = cluster.dispatcher.snapshot()
        assert snapshot.requests[RequestStatus.CANCELLED] == 1
        assert snapshot.num_inflight == 0


async def test_a_cancelled_consumer_cancels_on_both_nodes(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()

        async def silent(node, peer, message) -> None:
            return

        prefill.script = decode.script = silent
        request = cluster.request()
        consumer = asyncio.ensure_future(_collect(await cluster.start(request)))
        await decode.until_heard(lambda: decode.tasks())

        consumer.cancel()
        await asyncio.wait((consumer,))

        await prefill.until_heard(lambda: prefill.cancelled())
        await decode.until_heard(lambda: decode.cancelled())
        await cluster.until_status(request.request_id, RequestStatus.CANCELLED)


async def test_a_generation_entered_and_left_unread_sends_nothing_and_is_cancelled(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()
        request = cluster.request()

        async with await cluster.start(request):
            pass

        await cluster.until_status(request.request_id, RequestStatus.CANCELLED)
        assert prefill.heard == decode.heard == []


async def test_a_stop_string_is_a_finish_not_a_cancel(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()

        async def silent(node, peer, message) -> None:
            return

        decode.script = silent
        request = cluster.request()

        async with await cluster.start(request) as generation:
            await anext(generation)
            await generation.finish_early(FinishReason.STOP)
            assert [event async for event in generation] == []

        await prefill.until_heard(lambda: prefill.cancelled())
        await decode.until_heard(lambda: decode.cancelled())
        record = await cluster.until_status(request.request_id, RequestStatus.FINISHED)
        assert record.facts.finish_reason == "stop"
        assert record.facts.num_output_tokens == 1


async def test_time_is_bounded(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()

        async def silent(node, peer, message) -> None:
            return

        prefill.script = decode.script = silent
        request = cluster.request(timeout_s=3.0)  # for admission too: the nodes have to hear of it

        with pytest.raises(GenerationFailed) as caught:
            await _collect(await cluster.start(request))

        assert caught.value.code == "timeout"
        await prefill.until_heard(lambda: prefill.cancelled())
        await decode.until_heard(lambda: decode.cancelled())
        assert 0 < prefill.tasks()[0].timeout_s <= 3.0


async def test_no_node_is_a_refusal_before_anything(cluster) -> None:
    async with cluster:
        await cluster.until(lambda: cluster.pool.redis.is_ok)
        request = cluster.request()

        with pytest.raises(AdmissionRefused) as caught:
            await cluster.start(request)

        assert caught.value.code == "no_nodes"
        assert caught.value.retry_after_s > 0
        assert await cluster.store.get(request.request_id) is None


async def test_what_can_never_fit_is_the_callers_mistake(cluster) -> None:
    async with cluster:
        await cluster.pair()

        with pytest.raises(InvalidRequest) as caught:
            await cluster.start(cluster.request(max_tokens=119))
        assert caught.value.field == "max_tokens"
        with pytest.raises(InvalidRequest) as caught:
            await cluster.start(cluster.request(prompt_token_ids=(1,) * 128))
        assert caught.value.field == "prompt"
        assert cluster.dispatcher.snapshot().num_inflight == 0


async def test_requests_in_flight_are_bounded_and_the_place_comes_back(cluster) -> None:
    cluster.dispatch_config = dataclasses.replace(cluster.dispatch_config, max_inflight=1)
    async with cluster:
        await cluster.pair()
        async with await cluster.start(cluster.request()):
            with pytest.raises(AdmissionRefused) as caught:
                await cluster.start(cluster.request())
            assert caught.value.code == "server_overloaded"

        request = cluster.request()
        token_ids, _ = await _collect(await cluster.start(request))
        assert token_ids == cluster.expected(request, 6)


async def test_a_draining_gateway_takes_nothing_new_and_finishes_the_rest(cluster) -> None:
    async with cluster:
        await cluster.pair()
        request = cluster.request()
        generation = await cluster.start(request)
        cluster.dispatcher.drain()

        with pytest.raises(AdmissionRefused) as caught:
            await cluster.start(cluster.request())

        assert caught.value.code == "draining"
        assert (await _collect(generation))[0] == cluster.expected(request, 6)


async def test_a_client_that_leaves_during_admission_leaves_no_open_record(cluster) -> None:
    async with cluster:
        await cluster.pair()
        requests = [cluster.request() for _ in range(40)]
        for num_turns, request in enumerate(requests):
            starting = asyncio.create_task(cluster.start(request))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            starting.cancel()
            [outcome] = await asyncio.gather(starting, return_exceptions=True)
            if not isinstance(outcome, BaseException):
                async with outcome:
                    pass

        counts = cluster.dispatcher.snapshot().requests
        assert counts[RequestStatus.QUEUED] == 0
        written = [request for request in requests if await cluster.store.get(request.request_id) is not None]
        assert written, "the cancellations came at every point of the admission"
        for request in written:
            await cluster.until_status(request.request_id, RequestStatus.CANCELLED)


async def test_streams_outlive_redis_and_new_requests_wait_for_it(mortal_cluster, own_redis) -> None:
    async with mortal_cluster as cluster:
        _, decode = await cluster.pair()
        go_on = asyncio.Event()

        async def pauses(node, peer, message) -> None:
            await node.report(peer, message.task, Stage.DECODING)
            await node.speak(peer, message.task, 1, 3)
            await go_on.wait()
            await node.speak(peer, message.task, 3, 6)

        decode.script = pauses
        request = cluster.request()
        async with await cluster.start(request) as generation:
            token_ids = (await anext(generation)).token_ids
            own_redis.kill()
            await cluster.until(lambda: not cluster.pool.redis.is_ok)
            begun = time.monotonic()
            with pytest.raises(AdmissionRefused) as caught:
                await cluster.start(cluster.request())
            refused_after_s = time.monotonic() - begun
            go_on.set()
            async for event in generation:
                token_ids += event.token_ids

        assert token_ids == cluster.expected(request, 6)
        assert caught.value.code == "redis_unavailable"
        assert refused_after_s < 10
        assert cluster.dispatcher.snapshot().num_inflight == 0

        own_redis.start()
        await own_redis.wait_ready()
        await cluster.until(lambda: cluster.pool.redis.is_ok)
        again = cluster.request()
        assert (await _collect(await cluster.start(again)))[0] == cluster.expected(again, 6)
        await cluster.until_status(again.request_id, RequestStatus.FINISHED)
        counts = cluster.recorder.counts
        assert counts.submitted == counts.written + counts.dropped
        assert counts.dropped > 0  # the first request's record was lost with the old Redis


async def test_many_requests_many_ends_nothing_is_left(cluster) -> None:
    async with cluster:
        await cluster.pair()
        requests = [cluster.request() for _ in range(40)]

        async def consume(index: int) -> None:
            async with await cluster.start(requests[index]) as generation:
                async for event in generation:
                    if index % 2 and event.start >= index % 5:
                        break

        await asyncio.gather(*(consume(index) for index in range(len(requests))))

        snapshot = cluster.dispatcher.snapshot()
        ended = [snapshot.requests[status] for status in RequestStatus if status.is_terminal]
        assert sum(ended) == len(requests)
        assert snapshot.num_inflight == 0
        assert all(view.num_open_attempts == 0 for view in cluster.pool.views())
        await cluster.recorder.flush(30)
        counts = cluster.recorder.counts
        assert (counts.pending, counts.dropped) == (0, 0)
        for key in await cluster.redis.call("KEYS", "*"):
            assert await cluster.redis.call("PTTL", key) != -1  # which says that a key has no end


async def test_stop_strings_do_not_leave_the_gateway(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()
        sampling = SamplingParams(max_tokens=6, seed=7, stop=("END",))

        await _collect(await cluster.start(cluster.request(sampling=sampling)))

        assert [task.sampling.stop for task in prefill.tasks() + decode.tasks()] == [(), ()]


async def test_a_task_no_node_would_accept_fails_the_request_and_nothing_else(cluster) -> None:
    async with cluster:
        await cluster.pair()

        with pytest.raises(GenerationFailed) as caught:
            await _collect(await cluster.start(cluster.request(cache_salt="x" * 5000)))

        assert (caught.value.code, caught.value.retryable) == ("invalid_request", False)
        assert all(view.num_open_attempts == 0 for view in cluster.pool.views())


@pytest.mark.parametrize("forgetful", ["prefill", "decode"])
async def test_an_attempt_that_a_living_node_has_forgotten_is_made_again(cluster, forgetful: str) -> None:
    cluster.dispatch_config = dataclasses.replace(cluster.dispatch_config, gap_timeout_s=3.0)
    cluster.pool_config = dataclasses.replace(cluster.pool_config, forget_s=0.5)
    async with cluster:
        prefill, decode = await cluster.pair()
        node = prefill if forgetful == "prefill" else decode
        plain = node.script

        async def forgets(node, peer, message) -> None:
            if isinstance(message, PrefillTask | DecodeTask):
                node.script = plain
                node.held.clear()

        node.script = forgets
        request = cluster.request(timeout_s=600.0)
        begun = time.monotonic()

        generation = await cluster.start(request)
        token_ids, _ = await _collect(generation)

        assert token_ids == cluster.expected(request, 6)
        assert generation.stats.num_attempts == 2
        assert time.monotonic() - begun < 15


async def test_an_attempt_whose_cancellation_was_lost_is_cancelled_again(cluster) -> None:
    cluster.pool_config = dataclasses.replace(cluster.pool_config, forget_s=0.5)
    async with cluster:
        decode = await cluster.add(NodeRole.DECODE, "d1")

        decode.held.append("stray:1")

        await decode.until_heard(lambda: "stray:1" in decode.cancelled())
        assert decode.held == []
