import asyncio
import dataclasses

import pytest

from pdserve.control.errors import NodeIdTaken, RedisUnavailable
from pdserve.control.keyspace import Keyspace
from pdserve.control.lease_keeper import LeaseKeeper
from pdserve.control.messages import NodeInfo, NodeRole
from pdserve.control.node_registry import NodeRegistry
from pdserve.control.redis_connection import RedisConnection, connect

NODE = NodeInfo(
    node_id="d1",
    role=NodeRole.DECODE,
    incarnation="one",
    control_endpoint="tcp://127.0.0.1:1",
    transfer_endpoint="tcp://127.0.0.1:2",
    model_name="tiny",
    model_digest="abc",
    max_model_len=128,
    block_size=16,
    num_blocks=64,
    version="0.1.0",
)
LEASE_S = 60.0
SHORT_LEASE_S = 1.5  # of what is to end
SUCCESSOR = dataclasses.replace(NODE, incarnation="two")


@pytest.fixture
def registry(redis: RedisConnection, keyspace: Keyspace) -> NodeRegistry:
    return NodeRegistry(redis, keyspace, lease_s=LEASE_S)


@pytest.fixture
def forgetful(redis: RedisConnection, keyspace: Keyspace) -> NodeRegistry:
    return NodeRegistry(redis, keyspace, lease_s=SHORT_LEASE_S)


async def _until_listed(registry: NodeRegistry, expected: set[str]) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                if {node.info.incarnation for node in await registry.list()} == expected:
                    return
            except RedisUnavailable:
                assert expected, "a registry that is away lists nothing, which proves nothing"
            await asyncio.sleep(0.02)


async def _until_registered(keeper: LeaseKeeper, expected: bool) -> None:
    async with asyncio.timeout(30):
        while keeper.is_registered is not expected:  # noqa: ASYNC110 - a fact of another task, without an event
            await asyncio.sleep(0.02)


async def test_a_registered_node_is_listed_as_it_is(registry: NodeRegistry) -> None:
    await registry.renew(NODE)

    (listed,) = await registry.list()

    assert listed.info == NODE
    assert 0 <= listed.lease_age_s < LEASE_S


async def test_a_lease_that_is_not_renewed_ends(forgetful: NodeRegistry) -> None:
    await forgetful.renew(NODE)

    await _until_listed(forgetful, set())


async def test_a_released_node_is_gone_at_once(registry: NodeRegistry) -> None:
    await registry.renew(NODE)
    await registry.release(NODE)

    assert await registry.list() == ()


async def test_a_second_incarnation_is_refused_while_the_lease_lives(registry: NodeRegistry) -> None:
    """C170."""
    await registry.renew(NODE)

    with pytest.raises(NodeIdTaken) as caught:
        await registry.renew(SUCCESSOR)

    assert (caught.value.node_id, caught.value.holder) == ("d1", "one")
    assert [node.info for node in await registry.list()] == [NODE]


async def test_a_late_release_does_not_take_the_successors_lease(registry: NodeRegistry) -> None:
    await registry.renew(SUCCESSOR)
    await registry.release(NODE)

    assert [node.info for node in await registry.list()] == [SUCCESSOR]


async def test_every_key_has_a_ttl(registry: NodeRegistry, redis: RedisConnection) -> None:
    await registry.renew(NODE)

    keys = await redis.call("KEYS", "*")

    assert len(keys) == 2
    assert all([0 < await redis.call("PTTL", key) <= 10_000 * LEASE_S for key in keys])


async def test_a_node_of_another_version_does_not_hide_the_others(
    registry: NodeRegistry, redis: RedisConnection, keyspace: Keyspace
) -> None:
    await registry.renew(NODE)
    await redis.call("SET", keyspace.node("odd"), '{"incarnation": "x"}', "EX", 10)
    await redis.call("ZADD", keyspace.nodes, 1, "odd")

    assert [node.info for node in await registry.list()] == [NODE]


async def test_the_keeper_registers_renews_and_releases(redis: RedisConnection, keyspace: Keyspace) -> None:
    registry = NodeRegistry(redis, keyspace, lease_s=4.0)
    renewed_at = set()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(LeaseKeeper(registry, NODE).run(), name="lease")
        async with asyncio.timeout(30):
            while len(renewed_at) < 3:
                renewed_at |= {score for _, score in await redis.call("ZRANGE", keyspace.nodes, 0, -1, "WITHSCORES")}
                await asyncio.sleep(0.02)
        await _until_listed(registry, {"one"})
        running.cancel()

    assert await registry.list() == ()


async def test_the_keeper_waits_out_a_killed_predecessor(forgetful: NodeRegistry) -> None:
    await forgetful.renew(NODE)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(LeaseKeeper(forgetful, SUCCESSOR).run(), name="lease")
        await _until_listed(forgetful, {"two"})
        running.cancel()


async def test_the_keeper_gives_up_on_an_id_that_stays_taken(redis: RedisConnection, keyspace: Keyspace) -> None:
    """C170."""
    registry = NodeRegistry(redis, keyspace, lease_s=4.0)  # renewed every second, however busy the machine is
    async with asyncio.TaskGroup() as tasks:
        holder = tasks.create_task(LeaseKeeper(registry, NODE).run(), name="holder")
        await _until_listed(registry, {"one"})

        with pytest.raises(NodeIdTaken):
            await asyncio.wait_for(LeaseKeeper(registry, SUCCESSOR).run(), 30)

        assert [node.info for node in await registry.list()] == [NODE]
        holder.cancel()


async def test_an_emptied_redis_heals_by_itself(own_redis, keyspace: Keyspace) -> None:
    redis = connect(own_redis.url, timeout_s=30.0)
    registry = NodeRegistry(redis, keyspace, lease_s=SHORT_LEASE_S)
    keeper = LeaseKeeper(registry, NODE)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(keeper.run(), name="lease")
        await _until_listed(registry, {"one"})
        own_redis.kill()
        await _until_registered(keeper, False)
        own_redis.start()
        await own_redis.wait_ready()

        await _until_listed(registry, {"one"})

        await _until_registered(keeper, True)
        running.cancel()
    await redis.close()
