"""What the owner of an API key has used, in Redis: atomic, so that it is right across several gateways.

Keys (each always has a TTL):
    pdserve:<namespace>:quota:<owner>          hash: the two token buckets and the day's tokens
    pdserve:<namespace>:quota:<owner>:open     sorted set: request id by the end of its lease, in milliseconds

Rates are token buckets that hold one minute's worth and refill evenly. A request of unknown length is charged for its
prompt first and for its answer at its end, so a bucket may go below zero; the next one then waits that much longer.
"""

from dataclasses import dataclass
from enum import StrEnum

from pdserve.control.keyspace import Keyspace
from pdserve.control.redis_connection import LUA_NOW_MS, RedisConnection, Script

_BUCKETS = """
local function level_of(name, per_minute)
  local stored = redis.call('HMGET', KEYS[1], name, name .. ':at')
  if not stored[1] then return per_minute end
  local grown = (now - tonumber(stored[2])) * per_minute / 60000
  return math.min(per_minute, tonumber(stored[1]) + math.max(0, grown))
end
local function keep(name, level)
  redis.call('HSET', KEYS[1], name, tostring(level), name .. ':at', tostring(now))
end
local day = 'day:' .. math.floor(now / 86400000)
"""

# KEYS: hash, open requests. ARGV: request id, lease_ms, ttl_ms, tokens, then the limits (-1: none) of requests a
# minute, tokens a minute, tokens a day, open requests. Returns {'ok' or the limit that refuses, wait_ms, requests left,
# tokens left}. A second run finds the request open and charges nothing.
_TAKE = Script(
    LUA_NOW_MS
    + _BUCKETS
    + """
local tokens, rpm, tpm = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local tpd, most = tonumber(ARGV[7]), tonumber(ARGV[8])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local requests_left = rpm >= 0 and level_of('requests', rpm) or -1
local tokens_left = tpm >= 0 and level_of('tokens', tpm) or -1
local function reply(word, wait_ms)
  return {word, math.ceil(wait_ms), math.floor(requests_left), math.floor(tokens_left)}
end
if redis.call('ZSCORE', KEYS[2], ARGV[1]) then return reply('ok', 0) end
if most >= 0 and redis.call('ZCARD', KEYS[2]) >= most then return reply('max_concurrent', 1000) end
if rpm >= 0 and requests_left < 1 then return reply('requests_per_minute', (1 - requests_left) * 60000 / rpm) end
local wanted = math.min(tokens, tpm)
if tpm >= 0 and tokens_left < wanted then return reply('tokens_per_minute', (wanted - tokens_left) * 60000 / tpm) end
local used = tonumber(redis.call('HGET', KEYS[1], day) or '0')
if tpd >= 0 and used + tokens > tpd then return reply('tokens_per_day', 86400000 - now % 86400000) end
if rpm >= 0 then requests_left = requests_left - 1; keep('requests', requests_left) end
if tpm >= 0 then tokens_left = tokens_left - tokens; keep('tokens', tokens_left) end
redis.call('HINCRBY', KEYS[1], day, tokens)
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[2]), ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return reply('ok', 0)
"""
)

# KEYS: as above. ARGV: request id, tokens beyond what was taken (negative: less), tokens a minute or -1, ttl_ms.
_SETTLE = Script(
    LUA_NOW_MS
    + _BUCKETS
    + """
if redis.call('ZREM', KEYS[2], ARGV[1]) == 0 then return 0 end
local more, tpm = tonumber(ARGV[2]), tonumber(ARGV[3])
if tpm >= 0 then keep('tokens', math.min(tpm, level_of('tokens', tpm) - more)) end
if redis.call('HINCRBY', KEYS[1], day, more) < 0 then redis.call('HSET', KEYS[1], day, 0) end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
"""
)

_TTL_MS = 2 * 86_400_000


class QuotaLimit(StrEnum):
    """What can refuse a request."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    TOKENS_PER_DAY = "tokens_per_day"
    MAX_CONCURRENT = "max_concurrent"


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one owner; None is none."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    tokens_per_day: int | None
    max_concurrent: int | None


@dataclass(frozen=True, slots=True)
class QuotaAnswer:
    """`refused_by` is None if the request was charged; what is left is None where nothing limits it."""

    refused_by: QuotaLimit | None
    wait_s: float
    requests_left: int | None
    tokens_left: int | None


class QuotaStore:
    """What every owner of one namespace has used. A gateway that dies holds its requests for `lease_s` at most."""

    def __init__(self, redis: RedisConnection, keyspace: Keyspace, lease_s: float) -> None:
        self._redis = redis
        self._keyspace = keyspace
        self._lease_s = lease_s

    async def take(self, owner: str, request_id: str, num_tokens: int, quota: Quota) -> QuotaAnswer:
        """Charge a request and `num_tokens`, or say what refuses it; a repeated call charges once.

        Raises:
            RedisUnavailable: nothing can be charged now.
        """
        limits = (quota.requests_per_minute, quota.tokens_per_minute, quota.tokens_per_day, quota.max_concurrent)
        known = [_or_none(limit) for limit in limits]
        arguments: list[str | int] = [request_id, int(self._lease_s * 1000), _TTL_MS, num_tokens, *known]
        word, wait_ms, requests_left, tokens_left = await self._redis.run(_TAKE, self._keys(owner), arguments)
        return QuotaAnswer(
            None if word == "ok" else QuotaLimit(word),
            wait_ms / 1000,
            None if quota.requests_per_minute is None else max(0, requests_left),
            None if quota.tokens_per_minute is None else max(0, tokens_left),
        )

    async def settle(self, owner: str, request_id: str, num_more_tokens: int, quota: Quota) -> None:
        """End a charged request and charge `num_more_tokens` (negative: give back); a repeated call does nothing.

        Raises:
            RedisUnavailable: nothing can be written now; the lease ends it.
        """
        arguments = (request_id, num_more_tokens, _or_none(quota.tokens_per_minute), _TTL_MS)
        await self._redis.run(_SETTLE, self._keys(owner), arguments)

    def _keys(self, owner: str) -> list[str]:
        return [self._keyspace.quota(owner), self._keyspace.open_of(owner)]


def _or_none(limit: int | None) -> int:
    return -1 if limit is None else limit
