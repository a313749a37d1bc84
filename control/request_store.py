"""Request records in Redis: created once, changed by compare-and-set, gone by themselves.

Keys (all that this module writes; each always has a TTL):
    pdserve:<namespace>:request:<request_id>   hash: the fields of RequestRecord, `story` as JSON
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.control.errors import ControlError, IllegalTransition, RecordExists, RecordMissing, TransitionConflict
from pdserve.control.keyspace import Keyspace
from pdserve.control.redis_connection import LUA_NOW_MS, RedisConnection, Script, ScriptCall
from pdserve.control.request_state import (
    MAX_STORY_ENTRIES,
    RequestFacts,
    RequestRecord,
    RequestStatus,
    StatusChange,
    StoryEntry,
    check_path,
)

# KEYS[1] record; ARGV: ttl_ms, gateway id, number of prompt tokens. Returns 1, or 0 if another gateway holds
# the id.
_CREATE = Script(
    LUA_NOW_MS
    + """
local owner = redis.call('HGET', KEYS[1], 'gateway_id')
if owner then
  if owner == ARGV[2] and redis.call('HGET', KEYS[1], 'status') == 'queued' then return 1 end
  return 0
end
redis.call('HSET', KEYS[1], 'status', 'queued', 'gateway_id', ARGV[2], 'num_prompt_tokens', ARGV[3],
  'created_ms', now, 'updated_ms', now, 'story', cjson.encode({{now, 'queued', ''}}))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
"""
)

# KEYS[1] record; ARGV: ttl_ms, expected status, new status, story limit, JSON of [[status, note], ...], then
# facts as field, value, ... Returns {'ok'}, {'missing'}, or {'conflict', status, story}. A second run finds
# the new status with the same last note and is 'ok' too.
_TRANSITION = Script(
    LUA_NOW_MS
    + """
local stored = redis.call('HMGET', KEYS[1], 'status', 'story')
if not stored[1] then return {'missing'} end
local story = cjson.decode(stored[2])
local steps = cjson.decode(ARGV[5])
if stored[1] ~= ARGV[2] then
  local last = story[#story]
  if stored[1] == ARGV[3] and last[3] == steps[#steps][2] then return {'ok'} end
  return {'conflict', stored[1], stored[2]}
end
for _, step in ipairs(steps) do table.insert(story, {now, step[1], step[2]}) end
while #story > tonumber(ARGV[4]) do table.remove(story, 2) end
redis.call('HSET', KEYS[1], 'status', ARGV[3], 'updated_ms', now, 'story', cjson.encode(story))
for i = 6, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return {'ok'}
"""
)

_SPARE_ACTIVE_S = 60.0
_INTEGER_FACTS = frozenset({"num_attempts", "num_output_tokens"})


@dataclass(frozen=True, slots=True)
class RecordLifetimes:
    """How long a record lives after its last change; while its request runs it must not expire."""

    active_s: float = 3600.0
    terminal_s: float = 600.0

    @classmethod
    def of_requests(cls, timeout_s: float) -> "RecordLifetimes":
        """Return the lifetimes where a request may take `timeout_s`, all of it perhaps after the last change."""
        return cls(active_s=timeout_s + _SPARE_ACTIVE_S)


@dataclass(frozen=True, slots=True)
class Transition:
    """A request's way from `expected` along `path`, and what is known with it."""

    request_id: str
    expected: RequestStatus
    path: tuple[StatusChange, ...]
    facts: RequestFacts


class RequestStore:
    """The records of one namespace."""

    def __init__(self, redis: RedisConnection, keyspace: Keyspace, lifetimes: RecordLifetimes | None = None) -> None:
        self._redis = redis
        self._keyspace = keyspace
        self._lifetimes = lifetimes or RecordLifetimes()

    async def create(self, request_id: str, gateway_id: str, num_prompt_tokens: int) -> None:
        """Write a QUEUED record.

        Raises:
            RecordExists: the id is in use.
            RedisUnavailable: nothing can be written now.
        """
        arguments = (int(self._lifetimes.active_s * 1000), gateway_id, num_prompt_tokens)
        is_created = await self._redis.run(_CREATE, [self._keyspace.request(request_id)], arguments)
        if not is_created:
            raise RecordExists(f"request {request_id} already has a record")

    async def transition(
        self,
        request_id: str,
        expected: RequestStatus,
        path: tuple[StatusChange, ...],
        facts: RequestFacts | None = None,
    ) -> None:
        """Walk from `expected` along `path` in one compare-and-set, and store `facts` with it.

        Raises:
            IllegalTransition: a step is not in the table; nothing was sent.
            TransitionConflict: the record is not in `expected`.
            RecordMissing: there is no record.
            RedisUnavailable: nothing can be written now.
        """
        (problem,) = await self.transitions([Transition(request_id, expected, path, facts or RequestFacts())])
        if problem is not None:
            raise problem

    async def transitions(self, changes: Sequence[Transition]) -> list[ControlError | None]:
        """Make each of `changes`, of different requests, in one round trip; return why one was not made, or None.

        Raises:
            RedisUnavailable: nothing can be written now.
        """
        problems: dict[str, ControlError | None] = {}
        calls: dict[str, ScriptCall] = {}
        for change in changes:
            try:
                calls[change.request_id] = ([self._keyspace.request(change.request_id)], self._arguments(change))
            except IllegalTransition as error:
                problems[change.request_id] = error
        answers = dict(zip(calls, await self._redis.run_each(_TRANSITION, list(calls.values())), strict=True))
        for change in changes:
            if change.request_id in answers:
                problems[change.request_id] = _problem(change, answers[change.request_id])
        return [problems[change.request_id] for change in changes]

    def _arguments(self, change: Transition) -> list[str | int]:
        path = change.path
        check_path(change.request_id, change.expected, path)
        target = path[-1].status
        ttl_s = self._lifetimes.terminal_s if target.is_terminal else self._lifetimes.active_s
        steps = json.dumps([[change.status.value, change.note] for change in path])
        arguments: list[str | int] = [
            int(ttl_s * 1000),
            change.expected.value,
            target.value,
            MAX_STORY_ENTRIES,
            steps,
        ]
        for name in RequestFacts.__dataclass_fields__:
            if (value := getattr(change.facts, name)) is not None:
                arguments += [name, value]
        return arguments

    async def get(self, request_id: str) -> RequestRecord | None:
        """Return the record, or None.

        Raises:
            RedisUnavailable: nothing can be read now.
        """
        answer = await self._redis.call("HGETALL", self._keyspace.request(request_id))
        fields = _as_dict(answer)
        return _record_of(request_id, fields) if fields else None


def _problem(change: Transition, answer: list[str]) -> ControlError | None:
    if answer[0] == "missing":
        return RecordMissing(f"request {change.request_id} has no record")
    if answer[0] == "conflict":
        story = tuple(f"{status} ({note})" if note else status for _, status, note in json.loads(answer[2]))
        return TransitionConflict(change.request_id, change.expected, answer[1], story)
    return None


def _as_dict(answer: Any) -> dict[str, str]:
    if isinstance(answer, dict):
        return answer
    return dict(zip(answer[::2], answer[1::2], strict=True))


def _record_of(request_id: str, fields: dict[str, str]) -> RequestRecord:
    story = tuple(
        StoryEntry(at_ms=int(at_ms), status=RequestStatus(status), note=note)
        for at_ms, status, note in json.loads(fields["story"])
    )
    known: dict[str, Any] = {
        name: int(fields[name]) if name in _INTEGER_FACTS else fields[name]
        for name in RequestFacts.__dataclass_fields__
        if name in fields
    }
    return RequestRecord(
        request_id=request_id,
        gateway_id=fields["gateway_id"],
        status=RequestStatus(fields["status"]),
        num_prompt_tokens=int(fields["num_prompt_tokens"]),
        created_ms=int(fields["created_ms"]),
        updated_ms=int(fields["updated_ms"]),
        facts=RequestFacts(**known),
        story=story,
    )
