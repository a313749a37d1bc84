"""Gateways as they see each other through Redis: who lives, and which of its requests others want ended.

Keys (each always has a TTL):
    pdserve:<namespace>:gateway:<id>            string: there while the gateway lives
    pdserve:<namespace>:gateway:<id>:cancels    set: ids of answers that it shall end
"""

from pdserve.control.keyspace import Keyspace
from pdserve.control.redis_connection import RedisConnection, Script

# KEYS[1] lease, KEYS[2] cancels. ARGV[1] lease_ms. Returns the ids that were asked for; a second run has none left,
# and who asked asks again.
_HEAR = Script(
    """
redis.call('SET', KEYS[1], 'lives', 'PX', ARGV[1])
local asked = redis.call('SMEMBERS', KEYS[2])
redis.call('DEL', KEYS[2])
return asked
"""
)

# KEYS[1] lease, KEYS[2] cancels. ARGV[1] lease_ms, ARGV[2] id of an answer. Returns 0 if nobody is there to hear it.
_TELL = Script(
    """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('SADD', KEYS[2], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return 1
"""
)


class GatewayPeers:
    """The gateways of one namespace, seen from one of them."""

    def __init__(self, redis: RedisConnection, keyspace: Keyspace, gateway_id: str, lease_s: float = 15.0) -> None:
        self._redis = redis
        self._keyspace = keyspace
        self._gateway_id = gateway_id
        self._lease_ms = int(lease_s * 1000)

    async def hear(self) -> list[str]:
        """Say that this gateway lives, and return the ids of its answers that others want ended.

        Raises:
            RedisUnavailable: nothing can be heard now.
        """
        asked: list[str] = await self._redis.run(_HEAR, self._keys(self._gateway_id), [self._lease_ms])
        return asked

    async def tell(self, gateway_id: str, response_id: str) -> bool:
        """Ask a gateway to end what it answers under `response_id`; whether it lives. Again is harmless.

        Raises:
            RedisUnavailable: nothing can be told now.
        """
        return bool(await self._redis.run(_TELL, self._keys(gateway_id), [self._lease_ms, response_id]))

    async def is_alive(self, gateway_id: str) -> bool:
        """Whether a gateway has lately said that it lives; this one does.

        Raises:
            RedisUnavailable: nothing can be read now.
        """
        if gateway_id == self._gateway_id:
            return True
        return bool(await self._redis.call("EXISTS", self._keyspace.gateway(gateway_id)))

    async def leave(self) -> None:
        """Say that this gateway ends: all that it did is recorded.

        Raises:
            RedisUnavailable: nothing can be written now; the lease ends by itself.
        """
        await self._redis.call("DEL", *self._keys(self._gateway_id))

    def _keys(self, gateway_id: str) -> list[str]:
        return [self._keyspace.gateway(gateway_id), self._keyspace.cancels_of(gateway_id)]
