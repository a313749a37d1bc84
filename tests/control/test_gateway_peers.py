import pytest

from pdserve.control.gateway_peers import GatewayPeers
from pdserve.control.keyspace import Keyspace
from pdserve.control.redis_connection import RedisConnection


@pytest.fixture
def peers(redis: RedisConnection, keyspace: Keyspace) -> tuple[GatewayPeers, GatewayPeers]:
    return GatewayPeers(redis, keyspace, "a", 60.0), GatewayPeers(redis, keyspace, "b", 60.0)


async def test_what_a_gateway_is_told_it_hears_once(peers: tuple[GatewayPeers, GatewayPeers]) -> None:
    a, b = peers
    assert await b.hear() == []

    assert await a.tell("b", "cmpl-1") and await a.tell("b", "cmpl-1") and await a.tell("b", "cmpl-2")

    assert sorted(await b.hear()) == ["cmpl-1", "cmpl-2"]
    assert await b.hear() == [] == await a.hear()


async def test_a_gateway_that_left_or_never_was_is_not_told(peers: tuple[GatewayPeers, GatewayPeers]) -> None:
    a, b = peers
    assert not await a.tell("b", "cmpl-1") and not await a.is_alive("b") and await a.is_alive("a")

    await b.hear()
    assert await a.is_alive("b") and await a.tell("b", "cmpl-1")

    await b.leave()
    assert not await a.is_alive("b") and not await a.tell("b", "cmpl-1")


async def test_every_key_ends_by_itself(redis: RedisConnection, peers: tuple[GatewayPeers, GatewayPeers]) -> None:
    a, b = peers
    await b.hear()
    await a.tell("b", "cmpl-1")

    keys = await redis.call("KEYS", "pdserve:test:gateway:*")

    assert len(keys) == 2
    for key in keys:
        assert 0 < await redis.call("PTTL", key) <= 60_000
