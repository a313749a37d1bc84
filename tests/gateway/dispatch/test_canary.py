import dataclasses

from pdserve.control.messages import DecodeTask, NodeRole, PrefillTask
from pdserve.control.request_state import RequestStatus
from pdserve.gateway.canary import Canary
from pdserve.gateway.dispatch_config import CanaryConfig

CONFIG = CanaryConfig(interval_s=600, timeout_s=30, retry_s=0.05)


def _start(cluster) -> Canary:
    canary = Canary(cluster.dispatcher, cluster.pool, (1, 2, 3), CONFIG)
    cluster.run_beside(canary.run())
    return canary


async def test_ready_is_a_token_through_both_nodes(cluster) -> None:
    async with cluster:
        canary = _start(cluster)
        await cluster.until(lambda: cluster.pool.redis.is_ok)
        assert not canary.ready

        prefill, decode = await cluster.pair()
        await cluster.until(lambda: canary.ready and prefill.tasks())

        assert decode.tasks()[-1].cache_salt
        snapshot = cluster.dispatcher.snapshot()
        assert all(snapshot.requests[status] == 0 for status in RequestStatus)
        assert snapshot.num_attempts == 0


async def test_a_path_without_tokens_is_not_ready_however_healthy_its_nodes(cluster) -> None:
    async with cluster:
        decode = cluster.launch(NodeRole.DECODE, "d1")
        plain = decode.script

        async def fails(node, peer, message) -> None:
            if isinstance(message, DecodeTask):
                await node.fail(peer, message.task, "engine_error", retryable=False)

        decode.script = fails
        canary = _start(cluster)
        await cluster.until(lambda: len(decode.tasks()) >= 2)
        assert not canary.ready

        decode.script = plain
        await cluster.until(lambda: canary.ready)


async def test_the_loss_of_a_proven_node_ends_readiness_until_another_proof(cluster) -> None:
    async with cluster:
        canary = _start(cluster)
        first = await cluster.add(NodeRole.DECODE, "d1")
        await cluster.until(lambda: canary.ready)

        await cluster.kill(first)
        await cluster.until(lambda: not canary.ready)
        second = await cluster.add(NodeRole.DECODE, "d2")
        await cluster.until(lambda: canary.ready)

        assert second.tasks()


async def test_without_redis_nothing_is_ready(mortal_cluster, own_redis) -> None:
    async with mortal_cluster as cluster:
        canary = _start(cluster)
        await cluster.add(NodeRole.DECODE, "d1")
        await cluster.until(lambda: canary.ready)

        own_redis.kill()
        await cluster.until(lambda: not canary.ready)
        own_redis.start()
        await own_redis.wait_ready()

        await cluster.until(lambda: canary.ready)


async def test_requests_with_a_token_from_a_decode_node_are_proof_enough(cluster) -> None:
    async with cluster:
        canary = Canary(cluster.dispatcher, cluster.pool, (1, 2, 3), CONFIG)
        await cluster.pair()
        async with await cluster.start(cluster.request()) as generation:
            async for _ in generation:
                pass

        assert canary.ready


async def test_a_first_token_alone_proves_no_path(cluster) -> None:
    async with cluster:
        canary = Canary(cluster.dispatcher, cluster.pool, (1, 2, 3), CONFIG)
        await cluster.pair()
        async with await cluster.start(cluster.request(max_tokens=1)) as generation:
            async for _ in generation:
                pass

        assert not canary.ready


async def test_each_pair_is_tried_by_itself(cluster) -> None:
    async with cluster:
        prefills = [await cluster.add(NodeRole.PREFILL, f"p{i}") for i in (1, 2)]
        decodes = [await cluster.add(NodeRole.DECODE, f"d{i}") for i in (1, 2)]

        _start(cluster)
        await cluster.until(lambda: sum(len(node.tasks()) for node in prefills) == 4)

        asked = [(node.key.node_id, message) for node in prefills for message in node.heard]
        pairs = {(name, message.decode_node_id) for name, message in asked if isinstance(message, PrefillTask)}
        assert pairs == {(p.key.node_id, d.key.node_id) for p in prefills for d in decodes}
        to_decode = [message for node in decodes for message in node.heard if isinstance(message, DecodeTask)]
        assert all(message.transfer_id is not None for message in to_decode)


async def test_a_broken_transfer_is_not_hidden_by_a_decode_node_that_prefills_by_itself(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()
        plain = decode.script

        async def takes_no_blocks(node, peer, message) -> None:
            if isinstance(message, DecodeTask) and message.transfer_id is not None:
                await node.fail(peer, message.task, "transfer_failed", retryable=True)
            else:
                await plain(node, peer, message)

        decode.script = takes_no_blocks
        canary = _start(cluster)
        await cluster.until(lambda: len(prefill.tasks()) >= 3)

        assert not canary.ready
        decode.script = plain
        await cluster.until(lambda: canary.ready)


async def test_not_ready_before_the_expected_nodes_are_proven_and_then_without_one_of_them(cluster) -> None:
    async with cluster:
        config = dataclasses.replace(CONFIG, expected_prefill_nodes=2, expected_decode_nodes=1)
        canary = Canary(cluster.dispatcher, cluster.pool, (1, 2, 3), config)
        cluster.run_beside(canary.run())
        first, decode = await cluster.pair()
        await cluster.until(lambda: decode.tasks() and cluster.dispatcher.proofs.covers(frozenset({decode.key})))
        assert not canary.ready
        assert canary.missing_nodes() == "1 of 2 prefill nodes and 1 of 1 decode nodes are ready"

        second = await cluster.add(NodeRole.PREFILL, "p2")
        await cluster.until(lambda: canary.ready)
        assert first.tasks() and second.tasks()

        await cluster.kill(second)
        await cluster.until(lambda: not cluster.pool.is_alive(second.key))
        assert canary.ready
