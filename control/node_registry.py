"""Which nodes there are: one lease a node in Redis, renewed with everything there is to know about it.

Keys (all that this module writes; each always has a TTL): pdserve:<namespace>:node:<node_id>   string:
NodeInfo as JSON; lives for one lease pdserve:<namespace>:nodes            sorted set: node id -> Redis time
of its last renewal in ms; ten leases
"""

import json
import logging
from dataclasses import dataclass
from typing import cast

from pdserve.control.codec import NODE_INFO
from pdserve.control.errors import MessageError, NodeIdTaken
from pdserve.control.keyspace import Keyspace
from pdserve.control.messages import NodeInfo
from pdserve.control.redis_connection import LUA_NOW_MS, RedisConnection, Script

logger = logging.getLogger(__name__)

# KEYS: lease, index; ARGV: lease ms, node id, incarnation, NodeInfo JSON. Returns the incarnation that holds
# the id.
_RENEW = Script(
    LUA_NOW_MS
    + """
local held = redis.call('GET', KEYS[1])
if held then
  local holder = cjson.decode(held)['incarnation']
  if holder ~= ARGV[3] then return holder end
end
redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[1])
redis.call('ZADD', KEYS[2], now, ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - 10 * ARGV[1])
redis.call('PEXPIRE', KEYS[2], 10 * ARGV[1])
return ARGV[3]
"""
)

# KEYS: lease, index; ARGV: node id, incarnation. Deletes only what this incarnation wrote.
_RELEASE = Script(
    """
local held = redis.call('GET', KEYS[1])
if held and cjson.decode(held)['incarnation'] == ARGV[2] then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
end
return 1
"""
)

# KEYS: index; ARGV: prefix of lease keys. Returns {NodeInfo JSON, age ms, ...} of the live leases.
_LIST = Script(
    LUA_NOW_MS
    + """
local found = {}
local entries = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for i = 1, #entries, 2 do
  local held = redis.call('GET', ARGV[1] .. entries[i])
  if held then
    table.insert(found, held)
    table.insert(found, math.max(0, math.floor(now - entries[i + 1])))
  end
end
return found
"""
)


@dataclass(frozen=True, slots=True)
class RegisteredNode:
    """A node with a live lease, and how long ago it was renewed."""

    info: NodeInfo
    lease_age_s: float


class NodeRegistry:
    """The nodes of one namespace."""

    def __init__(self, redis: RedisConnection, keyspace: Keyspace, lease_s: float = 10.0) -> None:
        self._redis = redis
        self._keyspace = keyspace
        self.lease_s = lease_s

    async def renew(self, info: NodeInfo) -> None:
        """Take or extend the lease of `info.node_id`, and write all of `info` again.

        Raises:
            NodeIdTaken: another incarnation holds a live lease.
            RedisUnavailable: nothing can be written now.
        """
        written = json.dumps(NODE_INFO.to_wire(info))
        keys = [self._keyspace.node(info.node_id), self._keyspace.nodes]
        arguments = (int(self.lease_s * 1000), info.node_id, info.incarnation, written)
        holder = str(await self._redis.run(_RENEW, keys, arguments))
        if holder != info.incarnation:
            raise NodeIdTaken(info.node_id, holder)

    async def release(self, info: NodeInfo) -> None:
        """Give the lease back, if this incarnation holds it.

        Raises:
            RedisUnavailable: the lease will run out by itself.
        """
        keys = [self._keyspace.node(info.node_id), self._keyspace.nodes]
        await self._redis.run(_RELEASE, keys, (info.node_id, info.incarnation))

    async def list(self) -> tuple[RegisteredNode, ...]:
        """Return every node with a live lease.

        Raises:
            RedisUnavailable: nothing can be read now.
        """
        answer = await self._redis.run(_LIST, [self._keyspace.nodes], (self._keyspace.node(""),))
        found = []
        for written, age_ms in zip(answer[::2], answer[1::2], strict=True):
            try:
                info = cast(NodeInfo, NODE_INFO.from_wire(json.loads(written), "node"))
            except (ValueError, MessageError) as error:
                logger.warning("ignoring a registered node of another version: %s", error)
                continue
            found.append(RegisteredNode(info, int(age_ms) / 1000))
        return tuple(found)
