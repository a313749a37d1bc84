"""An external Redis is asked once, before anything slow, and what is wrong with it is said without its password."""

import asyncio

import pytest

from pdserve.cli.errors import SettingError
from pdserve.cli.redis_check import check_redis


@pytest.fixture
def redis_url(shared_redis) -> str:
    asyncio.run(shared_redis.wait_ready())
    return str(shared_redis.url)


def test_a_redis_that_answers_is_accepted(redis_url: str) -> None:
    check_redis(redis_url)


def test_a_refused_password_is_not_shown(redis_url: str) -> None:
    url = redis_url.replace("unix://", "unix://someone:secret@")

    with pytest.raises(
        SettingError, match=r"--redis-url \(env REDIS_URL\): .*invalid username-password pair"
    ) as caught:
        check_redis(url)

    assert "secret" not in str(caught.value)


def test_a_redis_that_is_not_there_is_named_with_the_fix() -> None:
    with pytest.raises(SettingError, match=r"connecting to 127\.0\.0\.1:1\..*give none: `pdserve serve` then brings"):
        check_redis("redis://127.0.0.1:1/0")


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("socket_timeout=soon", "Invalid value for 'socket_timeout'"),
        ("colour=red", "unexpected keyword argument 'colour'"),
    ],
)
def test_a_query_that_nobody_knows_is_named(redis_url: str, query: str, reason: str) -> None:
    with pytest.raises(SettingError, match=rf"--redis-url \(env REDIS_URL\): .*{reason}"):
        check_redis(f"{redis_url}?{query}")
