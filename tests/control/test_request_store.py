import asyncio

import pytest

from pdserve.control.errors import (
    IllegalTransition,
    RecordExists,
    RecordMissing,
    RedisUnavailable,
    TransitionConflict,
)
from pdserve.control.keyspace import Keyspace
from pdserve.control.redis_connection import RedisConnection, connect
from pdserve.control.request_state import MAX_STORY_ENTRIES, RequestFacts, RequestStatus, StatusChange
from pdserve.control.request_store import RecordLifetimes, RequestStore, Transition

S = RequestStatus


@pytest.fixture
def store(redis: RedisConnection, keyspace: Keyspace) -> RequestStore:
    return RequestStore(redis, keyspace)


def _path(*statuses: RequestStatus) -> tuple[StatusChange, ...]:
    return tuple(StatusChange(status) for status in statuses)


async def test_a_record_tells_its_whole_story(store: RequestStore) -> None:
    await store.create("r1", "gateway-a", 12)
    await store.transition("r1", S.QUEUED, (StatusChange(S.PREFILLING, "on p1"),))
    await store.transition(
        "r1",
        S.PREFILLING,
        _path(S.TRANSFERRING, S.DECODING),
        RequestFacts(num_attempts=1, route="disaggregated", decode_node_id="d1"),
    )
    await store.transition("r1", S.DECODING, _path(S.FINISHED), RequestFacts(num_output_tokens=7))

    record = await store.get("r1")

    assert record is not None
    assert record.status is S.FINISHED
    assert (record.gateway_id, record.num_prompt_tokens) == ("gateway-a", 12)
    assert record.facts == RequestFacts(num_attempts=1, route="disaggregated", decode_node_id="d1", num_output_tokens=7)
    assert [(entry.status, entry.note) for entry in record.story] == [
        (S.QUEUED, ""),
        (S.PREFILLING, "on p1"),
        (S.TRANSFERRING, ""),
        (S.DECODING, ""),
        (S.FINISHED, ""),
    ]
    assert record.created_ms <= record.story[-1].at_ms == record.updated_ms


async def test_an_unknown_record_is_none_to_get_and_missing_to_transition(store: RequestStore) -> None:
    assert await store.get("nobody") is None
    with pytest.raises(RecordMissing):
        await store.transition("nobody", S.QUEUED, _path(S.PREFILLING))


async def test_an_id_belongs_to_one_gateway(store: RequestStore) -> None:
    await store.create("r1", "gateway-a", 1)
    await store.create("r1", "gateway-a", 1)

    with pytest.raises(RecordExists):
        await store.create("r1", "gateway-b", 1)


async def test_an_illegal_path_is_refused_before_redis(store: RequestStore) -> None:
    await store.create("r1", "g", 1)

    with pytest.raises(IllegalTransition):
        await store.transition("r1", S.QUEUED, _path(S.DECODING))

    record = await store.get("r1")
    assert record is not None and record.status is S.QUEUED


async def test_a_conflict_carries_what_was_found(store: RequestStore) -> None:
    await store.create("r1", "g", 1)
    await store.transition("r1", S.QUEUED, _path(S.CANCELLED))

    with pytest.raises(TransitionConflict) as caught:
        await store.transition("r1", S.QUEUED, _path(S.PREFILLING))

    assert caught.value.found == "cancelled"
    assert caught.value.story == ("queued", "cancelled")


async def test_of_many_racing_terminal_changes_one_wins(store: RequestStore) -> None:
    await store.create("r1", "g", 1)
    await store.transition("r1", S.QUEUED, _path(S.PREFILLING))
    ends = [StatusChange(S.FAILED, f"racer {index}") for index in range(20)]

    results = await asyncio.gather(
        *(store.transition("r1", S.PREFILLING, (end,)) for end in ends), return_exceptions=True
    )

    assert results.count(None) == 1
    assert all(result is None or isinstance(result, TransitionConflict) for result in results)
    record = await store.get("r1")
    assert record is not None and record.story[-1].note == ends[results.index(None)].note


async def test_the_same_change_twice_is_one_change(store: RequestStore) -> None:
    await store.create("r1", "g", 1)
    change = (StatusChange(S.PREFILLING, "attempt 1"),)

    await store.transition("r1", S.QUEUED, change)
    await store.transition("r1", S.QUEUED, change)

    record = await store.get("r1")
    assert record is not None and len(record.story) == 2


async def test_the_story_is_bounded_and_keeps_its_beginning_and_end(store: RequestStore) -> None:
    await store.create("r1", "g", 1)
    await store.transition("r1", S.QUEUED, _path(S.PREFILLING))
    for _ in range(MAX_STORY_ENTRIES):
        await store.transition("r1", S.PREFILLING, _path(S.DECODING, S.PREFILLING))

    record = await store.get("r1")

    assert record is not None
    assert len(record.story) == MAX_STORY_ENTRIES
    assert record.story[0].status is S.QUEUED
    assert record.story[-1].status is S.PREFILLING


async def test_every_key_has_a_ttl_and_a_terminal_one_is_shorter(redis: RedisConnection, keyspace: Keyspace) -> None:
    store = RequestStore(redis, keyspace, RecordLifetimes(active_s=1_000, terminal_s=100))
    await store.create("active", "g", 1)
    await store.create("ended", "g", 1)
    await store.transition("ended", S.QUEUED, _path(S.FAILED))

    keys = await redis.call("KEYS", "*")
    ttls = {key: await redis.call("TTL", key) for key in keys}

    assert set(ttls) == {keyspace.request("active"), keyspace.request("ended")}
    assert 900 < ttls[keyspace.request("active")] <= 1_000
    assert 0 < ttls[keyspace.request("ended")] <= 100


async def test_scripts_survive_a_script_flush(store: RequestStore, redis: RedisConnection) -> None:
    await store.create("r1", "g", 1)
    await redis.call("SCRIPT", "FLUSH")

    await store.create("r2", "g", 1)

    assert await store.get("r2") is not None


async def test_namespaces_do_not_meet(redis: RedisConnection) -> None:
    await RequestStore(redis, Keyspace("a")).create("r1", "g", 1)

    assert await RequestStore(redis, Keyspace("b")).get("r1") is None


@pytest.mark.parametrize("namespace", ["", "a:b", "a b", "x" * 65])
def test_a_namespace_that_could_break_a_key_is_refused(namespace: str) -> None:
    with pytest.raises(ValueError, match="namespace"):
        Keyspace(namespace)


async def test_redis_killed_and_started_again(own_redis, keyspace: Keyspace) -> None:
    redis = connect(own_redis.url, timeout_s=30.0)
    store = RequestStore(redis, keyspace)
    await store.create("r1", "g", 1)

    own_redis.kill()
    with pytest.raises(RedisUnavailable):
        await store.create("r2", "g", 1)
    own_redis.start()
    await own_redis.wait_ready()

    await store.create("r3", "g", 1)
    with pytest.raises(RecordMissing):
        await store.transition("r1", S.QUEUED, _path(S.PREFILLING))
    await redis.close()


def test_a_running_request_outlives_no_record() -> None:
    for timeout_s in (0.1, 600.0, 86_400.0):
        assert RecordLifetimes.of_requests(timeout_s).active_s >= timeout_s + 60


async def test_many_transitions_are_one_round_trip_and_fail_one_by_one(
    redis: RedisConnection, store: RequestStore
) -> None:
    for request_id in ("goes", "ended", "jumps"):
        await store.create(request_id, "g", 1)
    await store.transition("ended", S.QUEUED, _path(S.CANCELLED))
    await redis.call("SCRIPT", "FLUSH")  # a Redis that has restarted knows no script
    changes = [
        Transition("goes", S.QUEUED, _path(S.PREFILLING, S.FINISHED), RequestFacts(num_output_tokens=1)),
        Transition("gone", S.QUEUED, _path(S.PREFILLING), RequestFacts()),
        Transition("jumps", S.QUEUED, _path(S.QUEUED), RequestFacts()),
        Transition("ended", S.QUEUED, _path(S.PREFILLING), RequestFacts()),
    ]

    problems = await store.transitions(changes)

    assert [type(problem) for problem in problems] == [type(None), RecordMissing, IllegalTransition, TransitionConflict]
    assert await store.transitions(changes[:1]) == [None]  # a second run is harmless
    record, unmoved = await store.get("goes"), await store.get("jumps")
    assert record is not None and (record.status, record.facts.num_output_tokens) == (S.FINISHED, 1)
    assert unmoved is not None and unmoved.status is S.QUEUED
    assert await store.transitions([]) == []
