"""Stored responses in Redis: what /v1/responses gives back later, and what a next one continues.

Keys (each always has a TTL):
    pdserve:<namespace>:response:<id>          string: StoredResponse as JSON
    pdserve:<namespace>:response:<id>:owner    string: "run" while a gateway works on it in the background, then "done";
                                               "cancel" once it was cancelled or deleted meanwhile
"""

from dataclasses import dataclass
from typing import Any

import orjson

from pdserve.control.keyspace import Keyspace
from pdserve.control.redis_connection import RedisConnection, Script

MAX_STORED_BYTES = 4 * 2**20

# KEYS[1] owner. ARGV[1] ttl_ms. Returns 1 if the work shall go on, 0 if it was cancelled.
_RENEW = Script(
    """
if redis.call('GET', KEYS[1]) == 'cancel' then return 0 end
redis.call('SET', KEYS[1], 'run', 'PX', ARGV[1])
return 1
"""
)

# KEYS[1] owner, KEYS[2] response. ARGV[1] content, ARGV[2] ttl_ms. What was cancelled or deleted stays as it is.
_PUT_RUNNING = Script(
    """
if redis.call('GET', KEYS[1]) ~= 'cancel' then redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2]) end
"""
)

# KEYS[1] owner, KEYS[2] response. ARGV[1] owner_ttl_ms, ARGV[2] content, ARGV[3] ttl_ms. As above; it ends with this.
_PUT_END = Script(
    """
if redis.call('GET', KEYS[1]) == 'cancel' then return end
redis.call('SET', KEYS[1], 'done', 'PX', ARGV[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
"""
)

# KEYS[1] owner, KEYS[2] response. ARGV[1] owner_ttl_ms, ARGV[2] content, ARGV[3] ttl_ms.
# Returns 1 if it is there and somebody works on it: told to stop, and from now on it is what `content` says.
_CANCEL = Script(
    """
local owner = redis.call('GET', KEYS[1])
if not owner or owner == 'done' or redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
redis.call('SET', KEYS[1], 'cancel', 'PX', ARGV[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
"""
)

# KEYS[1] owner, KEYS[2] response. ARGV[1] owner_ttl_ms. Returns how many there were; who works on it is told to stop.
_DELETE = Script(
    """
if redis.call('GET', KEYS[1]) then redis.call('SET', KEYS[1], 'cancel', 'PX', ARGV[1]) end
return redis.call('DEL', KEYS[2])
"""
)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response object as clients see it, and the conversation up to its end as messages of a chat."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]

    def encode(self) -> str:
        """Return it as JSON."""
        return orjson.dumps({"response": self.response, "messages": self.messages}).decode()


class ResponseStore:
    """The stored responses of one namespace."""

    def __init__(self, redis: RedisConnection, keyspace: Keyspace, ttl_s: float, owner_ttl_s: float = 15.0) -> None:
        self._redis = redis
        self._keyspace = keyspace
        self._ttl_ms = int(ttl_s * 1000)
        self._owner_ttl_ms = int(owner_ttl_s * 1000)

    async def put(self, response_id: str, stored: StoredResponse) -> bool:
        """Keep a response, or replace what is kept; return False if it is too large to be kept.

        Raises:
            RedisUnavailable: nothing can be written now.
        """
        content = stored.encode()
        if len(content) > MAX_STORED_BYTES:
            return False
        await self._redis.call("SET", self._keyspace.response(response_id), content, "PX", self._ttl_ms)
        return True

    async def put_running(self, response_id: str, stored: StoredResponse) -> bool:
        """Do as `put` does for the gateway that works on it; a response cancelled or deleted meanwhile stays so.

        Raises:
            RedisUnavailable: nothing can be written now.
        """
        content = stored.encode()
        if len(content) > MAX_STORED_BYTES:
            return False
        await self._redis.run(_PUT_RUNNING, self._keys(response_id), [content, self._ttl_ms])
        return True

    async def put_end(self, response_id: str, stored: StoredResponse) -> bool:
        """Do as `put_running` does with how it ended, which no cancellation replaces any more.

        Raises:
            RedisUnavailable: nothing can be written now.
        """
        content = stored.encode()
        if len(content) > MAX_STORED_BYTES:
            return False
        await self._redis.run(_PUT_END, self._keys(response_id), [self._owner_ttl_ms, content, self._ttl_ms])
        return True

    async def get(self, response_id: str) -> StoredResponse | None:
        """Return what is kept, or None.

        Raises:
            RedisUnavailable: nothing can be read now.
        """
        content = await self._redis.call("GET", self._keyspace.response(response_id))
        if content is None:
            return None
        fields = orjson.loads(content)
        return StoredResponse(fields["response"], fields["messages"])

    async def delete(self, response_id: str) -> bool:
        """Forget a response, and stop who works on it; whether there was one.

        Raises:
            RedisUnavailable: nothing can be written now.
        """
        return bool(await self._redis.run(_DELETE, self._keys(response_id), [self._owner_ttl_ms]))

    async def renew(self, response_id: str) -> bool:
        """Say that this gateway works on it; False if it was cancelled meanwhile.

        Raises:
            RedisUnavailable: nothing can be written now.
        """
        return bool(await self._redis.run(_RENEW, [self._keyspace.owner_of(response_id)], [self._owner_ttl_ms]))

    async def release(self, response_id: str) -> None:
        """Say that nobody works on it any more.

        Raises:
            RedisUnavailable: nothing can be written now; the key ends by itself.
        """
        await self._redis.call("DEL", self._keyspace.owner_of(response_id))

    async def has_owner(self, response_id: str) -> bool:
        """Whether a gateway works on it.

        Raises:
            RedisUnavailable: nothing can be read now.
        """
        return bool(await self._redis.call("EXISTS", self._keyspace.owner_of(response_id)))

    async def cancel(self, response_id: str, cancelled: StoredResponse) -> bool:
        """Keep `cancelled` as its end and stop the gateway that works on it, whichever it is; whether there is one.

        Raises:
            RedisUnavailable: nothing can be written now.
        """
        arguments: list[str | int] = [self._owner_ttl_ms, cancelled.encode(), self._ttl_ms]
        return bool(await self._redis.run(_CANCEL, self._keys(response_id), arguments))

    def _keys(self, response_id: str) -> list[str]:
        return [self._keyspace.owner_of(response_id), self._keyspace.response(response_id)]
