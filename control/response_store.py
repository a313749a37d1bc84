"""Stored responses in Redis: what /v1/responses gives back later, and what a next one continues.

Keys (each always has a TTL):
    pdserve:<namespace>:response:<id>          string: StoredResponse as JSON
    pdserve:<namespace>:response:<id>:owner    string: "run" while a gateway works on it in the background, or "cancel"
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

# KEYS[1] owner. ARGV[1] ttl_ms. Returns 1 if somebody works on it and is told to stop.
_CANCEL = Script(
    """
if not redis.call('GET', KEYS[1]) then return 0 end
redis.call('SET', KEYS[1], 'cancel', 'PX', ARGV[1])
return 1
"""
)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response object as clients see it, and the conversation up to its end as messages of a chat."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]


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
        content = orjson.dumps({"response": stored.response, "messages": stored.messages}).decode()
        if len(content) > MAX_STORED_BYTES:
            return False
        await self._redis.call("SET", self._keyspace.response(response_id), content, "PX", self._ttl_ms)
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
        """Forget a response; whether there was one.

        Raises:
            RedisUnavailable: nothing can be written now.
        """
        return bool(await self._redis.call("DEL", self._keyspace.response(response_id)))

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

    async def ask_to_cancel(self, response_id: str) -> bool:
        """Tell the gateway that works on it, whichever it is, to stop; whether there is one.

        Raises:
            RedisUnavailable: nothing can be written now.
        """
        return bool(await self._redis.run(_CANCEL, [self._keyspace.owner_of(response_id)], [self._owner_ttl_ms]))
