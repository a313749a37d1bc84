import pytest

from pdserve.control.keyspace import Keyspace
from pdserve.control.redis_connection import RedisConnection
from pdserve.control.response_store import ResponseStore, StoredResponse

RUNNING, COMPLETED, CANCELLED = (
    StoredResponse({"id": "r", "status": status}, []) for status in ("in_progress", "completed", "cancelled")
)


@pytest.fixture
async def store(redis: RedisConnection) -> ResponseStore:
    store = ResponseStore(redis, Keyspace("test"), 60.0)
    await store.renew("r")
    await store.put_running("r", RUNNING)
    return store


async def test_a_cancellation_comes_before_the_end_or_is_none(store: ResponseStore) -> None:
    await store.put_end("r", COMPLETED)

    assert not await store.cancel("r", CANCELLED)
    assert await store.get("r") == COMPLETED


async def test_an_end_that_comes_after_the_cancellation_is_none(store: ResponseStore) -> None:
    assert await store.cancel("r", CANCELLED)
    await store.put_end("r", COMPLETED)

    assert await store.get("r") == CANCELLED
    assert not await store.renew("r")


async def test_what_is_deleted_while_it_runs_does_not_come_back(store: ResponseStore) -> None:
    assert await store.delete("r")

    assert not await store.cancel("r", CANCELLED)
    await store.put_running("r", RUNNING)
    await store.put_end("r", COMPLETED)
    assert await store.get("r") is None
