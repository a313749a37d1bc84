import asyncio
import dataclasses

import pytest

from pdserve.control.channel import ControlClient
from pdserve.control.errors import ChannelLost
from pdserve.control.messages import CancelTask, NodeRole
from pdserve.gateway.node_link import NodeLink


async def test_nodes_are_found_with_what_they_say_of_themselves(cluster) -> None:
    async with cluster:
        prefill, decode = await cluster.pair()

        views = cluster.pool.views()

        assert [view.info for view in views] == [decode.info, prefill.info]
        assert all(view.load == prefill.load for view in views)
        assert all(view.lease_age_s >= 0 for view in views)
        assert cluster.pool.redis.latency_ms is not None


async def test_a_killed_node_is_noticed_by_its_connection(cluster) -> None:
    async with cluster:
        decode = await cluster.add(NodeRole.DECODE, "d1")

        await cluster.kill(decode)
        await cluster.until(lambda: not cluster.pool.is_alive(decode.key))


async def test_a_restarted_node_is_another_incarnation(cluster) -> None:
    async with cluster:
        first = await cluster.add(NodeRole.DECODE, "d1")
        await cluster.kill(first)
        await cluster.registry.release(first.info)

        second = await cluster.add(NodeRole.DECODE, "d1")

        assert second.key.node_id == first.key.node_id
        assert cluster.pool.is_alive(second.key)
        await cluster.until(lambda: not cluster.pool.is_alive(first.key))


async def test_a_node_that_hangs_and_wakes_is_used_again(cluster) -> None:
    cluster.pool_config = dataclasses.replace(cluster.pool_config, silence_s=0.5)
    async with cluster:
        decode = await cluster.add(NodeRole.DECODE, "d1")

        decode.answers_pings = False
        await cluster.until(lambda: not cluster.pool.is_alive(decode.key))
        decode.answers_pings = True

        await cluster.until(lambda: cluster.pool.is_alive(decode.key))


async def test_who_sends_to_a_silent_node_hears_why_it_is_lost(cluster) -> None:
    cluster.pool_config = dataclasses.replace(cluster.pool_config, silence_s=0.5)
    async with cluster:
        decode = await cluster.add(NodeRole.DECODE, "d1")
        client = ControlClient.connect(cluster.context, decode.info.control_endpoint)
        link = NodeLink(decode.info, client, cluster.pool_config, "gateway-2", lambda: None)
        decode.answers_pings = False

        async with asyncio.timeout(30):
            reason = await link.run()

        assert reason.startswith("it has been silent for")
        with pytest.raises(ChannelLost, match=reason):
            link.send(CancelTask("attempt", "left"))


async def test_an_engine_without_progress_is_a_lost_node(cluster) -> None:
    async with cluster:
        decode = await cluster.add(NodeRole.DECODE, "d1")

        decode.load = dataclasses.replace(decode.load, running=1, progress_age_s=21.0)

        await cluster.until(lambda: not cluster.pool.is_alive(decode.key))


async def test_a_node_that_is_not_ready_gets_no_work_but_stays_known(cluster) -> None:
    async with cluster:
        decode = await cluster.add(NodeRole.DECODE, "d1")

        decode.load = dataclasses.replace(decode.load, ready=False)
        await cluster.until(lambda: not cluster.pool.is_alive(decode.key))

        assert [view.is_ready for view in cluster.pool.views()] == [False]


async def test_an_address_that_is_none_does_not_end_the_pool(cluster) -> None:
    async with cluster:
        good = await cluster.add(NodeRole.DECODE, "d1")
        await cluster.registry.renew(
            dataclasses.replace(good.info, node_id="d2", incarnation="x", control_endpoint="nonsense")
        )
        await asyncio.sleep(2 * cluster.pool_config.poll_s)

        third = await cluster.add(NodeRole.DECODE, "d3")
        assert cluster.pool.is_alive(third.key)


async def test_known_nodes_outlive_redis(mortal_cluster, own_redis) -> None:
    async with mortal_cluster as cluster:
        decode = await cluster.add(NodeRole.DECODE, "d1")

        own_redis.kill()
        await cluster.until(lambda: not cluster.pool.redis.is_ok)
        assert cluster.pool.is_alive(decode.key)

        own_redis.start()
        await own_redis.wait_ready()
        await cluster.until(lambda: cluster.pool.redis.is_ok)
        late = await cluster.add(NodeRole.DECODE, "d2")
        assert cluster.pool.is_alive(late.key)
