import asyncio

import pytest

from pdserve.control.errors import RedisUnavailable
from pdserve.control.redis_connection import RedisConnection, Script, connect
from pdserve.control.script_connections import ScriptConnections

_ECHO = Script("return ARGV[1]")
_COUNT_UP = Script("return redis.call('INCR', KEYS[1])")
_PERHAPS = Script("if ARGV[1] == 'bad' then return redis.error_reply('it is bad') end return ARGV[1]")


async def test_answers_are_those_of_their_calls_however_many_run_at_once(redis: RedisConnection) -> None:
    words = [f"{number} – \r\n$3\r\n" for number in range(200)]

    answers = await asyncio.gather(*(redis.run(_ECHO, [], [word]) for word in words))
    together = await redis.run_each(_ECHO, [([], [word]) for word in words])

    assert answers == words and together == words


async def test_numbers_and_empty_words_arrive_as_they_are(redis: RedisConnection) -> None:
    assert await redis.run_each(_ECHO, [([], [-(2**62)]), ([], [""])]) == [str(-(2**62)), ""]


async def test_idle_connections_leave_room_for_every_call(redis: RedisConnection) -> None:
    for _ in range(3):
        await asyncio.gather(*(redis.run(_ECHO, [], [number]) for number in range(100)))
        answers = await asyncio.gather(*(redis.call("ECHO", number) for number in range(100)))

        assert answers == [str(number) for number in range(100)]
    assert await redis.call("PING")


async def test_a_connection_that_redis_has_closed_is_made_anew(redis: RedisConnection) -> None:
    assert await redis.run(_COUNT_UP, ["n"], []) == 1
    for count in range(2, 2 + 2 * ScriptConnections.MAX_KEPT):
        await redis.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        assert await redis.run(_COUNT_UP, ["n"], []) == count


async def test_an_error_among_answers_leaves_the_connection_in_step(redis: RedisConnection) -> None:
    for _ in range(3):
        with pytest.raises(RedisUnavailable, match="it is bad"):
            await redis.run_each(_PERHAPS, [([], [word]) for word in ("a", "bad", "c")])

        assert await redis.run(_ECHO, [], ["in step"]) == "in step"


async def test_the_answer_of_a_cancelled_call_is_nobody_elses(redis: RedisConnection) -> None:
    for num_turns in range(40):
        async with asyncio.timeout(60):
            calling = asyncio.ensure_future(redis.run(_ECHO, [], ["cancelled"]))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            calling.cancel()
            await asyncio.wait((calling,))

            assert await redis.run(_ECHO, [], [num_turns]) == str(num_turns)


async def test_a_redis_that_has_restarted_is_found_again(own_redis) -> None:
    redis = connect(own_redis.url, timeout_s=30.0)
    assert await redis.run(_ECHO, [], ["before"]) == "before"
    own_redis.kill()
    with pytest.raises(RedisUnavailable):
        await redis.run(_ECHO, [], ["meanwhile"])
    own_redis.start()
    await own_redis.wait_ready()

    assert await redis.run(_ECHO, [], ["after"]) == "after"
    await redis.close()
