"""Quotas in a real Redis: exact at the limit, one charge a request, right across several writers."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pdserve.control.keyspace import Keyspace
from pdserve.control.quota_store import Quota, QuotaLimit, QuotaStore
from pdserve.control.redis_connection import RedisConnection


@pytest.fixture
def store(redis: RedisConnection, keyspace: Keyspace) -> QuotaStore:
    return QuotaStore(redis, keyspace, lease_s=30.0)


def quota(**limits: int) -> Quota:
    names = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_concurrent")
    return Quota(**{name: limits.get(name) for name in names})


@contextmanager
def elapsed() -> Iterator[Callable[[], float]]:
    """Yield what tells how long the block has taken at most, by Redis' clock: in milliseconds, each read by itself."""
    begun = time.monotonic()
    seconds = 0.0
    yield lambda: seconds
    seconds = time.monotonic() - begun + 0.01


def assert_refilled(left: int | None, least: int, refilled: float) -> None:
    """Check that a bucket holds what was left in it and at most what has come back since."""
    assert left is not None and least <= left <= least + refilled


async def test_requests_are_taken_until_the_limit_and_no_further(store: QuotaStore) -> None:
    limits = quota(requests_per_minute=3)

    with elapsed() as seconds:
        answers = [await store.take("ann", f"r{number}", 5, limits) for number in range(4)]

    assert [answer.refused_by for answer in answers] == [None, None, None, QuotaLimit.REQUESTS_PER_MINUTE]
    assert [answer.requests_left for answer in answers] == [2, 1, 0, 0]
    assert 20.0 - seconds() <= answers[3].wait_s <= 20.0  # one of three a minute comes back in 20 s
    assert (await store.take("bob", "r9", 5, limits)).refused_by is None


async def test_a_repeated_call_charges_once_and_settles_once(store: QuotaStore) -> None:
    limits = quota(requests_per_minute=10, tokens_per_minute=100, max_concurrent=1)

    with elapsed() as seconds:
        first = await store.take("ann", "r1", 40, limits)
        again = await store.take("ann", "r1", 40, limits)
        for _ in range(2):
            await store.settle("ann", "r1", -30, limits)
        after = await store.take("ann", "r2", 0, limits)

    assert first.tokens_left == 60 and first.requests_left == 9
    assert again.refused_by is after.refused_by is None
    assert_refilled(again.tokens_left, 60, 100 / 60 * seconds())
    assert_refilled(after.tokens_left, 90, 100 / 60 * seconds())
    assert_refilled(after.requests_left, 8, 10 / 60 * seconds())


async def test_an_answer_that_was_longer_than_charged_is_paid_by_the_next_one(store: QuotaStore) -> None:
    limits = quota(tokens_per_minute=60)

    with elapsed() as seconds:
        await store.take("ann", "r1", 10, limits)
        await store.settle("ann", "r1", 80, limits)
        refused = await store.take("ann", "r2", 10, limits)

    assert refused.refused_by is QuotaLimit.TOKENS_PER_MINUTE and refused.tokens_left == 0
    assert 40.0 - seconds() <= refused.wait_s <= 40.0  # 60 - 10 - 80 = -30; one a second until 10 are there


async def test_a_request_larger_than_the_whole_bucket_waits_for_a_full_one(store: QuotaStore) -> None:
    limits = quota(tokens_per_minute=50)

    assert (await store.take("ann", "r1", 500, limits)).refused_by is None
    assert (await store.take("ann", "r2", 1, limits)).refused_by is QuotaLimit.TOKENS_PER_MINUTE


async def test_the_days_budget_ends_at_midnight(store: QuotaStore) -> None:
    limits = quota(tokens_per_day=100)
    await store.take("ann", "r1", 60, limits)
    await store.settle("ann", "r1", 20, limits)

    refused = await store.take("ann", "r2", 30, limits)
    assert refused.refused_by is QuotaLimit.TOKENS_PER_DAY and 0 < refused.wait_s <= 86_400
    assert (await store.take("ann", "r3", 20, limits)).refused_by is None


async def test_the_lease_of_a_gateway_that_died_ends_by_itself(redis: RedisConnection, keyspace: Keyspace) -> None:
    short = QuotaStore(redis, keyspace, lease_s=0.05)
    limits = quota(max_concurrent=1)
    assert (await short.take("ann", "r1", 0, limits)).refused_by is None

    async with asyncio.timeout(20):
        number = 0
        while (await short.take("ann", f"other-{number}", 0, limits)).refused_by is not None:
            number += 1


async def test_many_gateways_at_once_admit_exactly_the_limit(store: QuotaStore) -> None:
    limits = quota(max_concurrent=7, requests_per_minute=1000)

    answers = await asyncio.gather(*(store.take("ann", f"r{number}", 1, limits) for number in range(40)))

    assert sum(answer.refused_by is None for answer in answers) == 7


async def test_everything_has_a_time_to_live(store: QuotaStore, redis: RedisConnection) -> None:
    await store.take("ann", "r1", 5, quota(tokens_per_minute=10))

    for key in await redis.call("KEYS", "*"):
        assert await redis.call("PTTL", key) > 0
