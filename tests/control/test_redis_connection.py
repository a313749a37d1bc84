import asyncio
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from pdserve.control.errors import RedisUnavailable
from pdserve.control.redis_connection import RedisConnection, Script, connect


@pytest.mark.parametrize(
    "url",
    ["", "localhost", "http://localhost", "redis+sentinel://host", "redis+sentinel:///service"],
)
def test_a_url_of_no_known_form_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"Redis URL|Sentinel URL|no host"):
        connect(url)


@pytest.mark.parametrize(
    "url",
    ["redis://user:secret@127.0.0.1:1/2", "rediss://127.0.0.1:1", "unix:///nowhere.sock?db=1"],
)
async def test_an_absent_redis_shows_at_the_first_call(url: str) -> None:
    redis = connect(url)

    with pytest.raises(RedisUnavailable):
        await redis.call("PING")

    await redis.close()


async def test_a_redis_that_accepts_but_does_not_answer_costs_its_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        redis = connect(f"redis://127.0.0.1:{mute.getsockname()[1]}")
        begun = time.monotonic()

        with pytest.raises(RedisUnavailable):
            await redis.call("PING")

        assert time.monotonic() - begun < 10  # and not for ever
        await redis.close()


async def test_an_error_of_redis_is_unavailable_with_its_text(redis: RedisConnection) -> None:
    with pytest.raises(RedisUnavailable, match="broken on purpose"):
        await redis.run(Script("return redis.error_reply('broken on purpose')"), [], [])


async def test_acl_user_and_database(own_redis) -> None:
    admin = connect(own_redis.url, timeout_s=30.0)
    await admin.call("ACL", "SETUSER", "alice", "on", ">secret", "~*", "+@all")
    alice = connect(own_redis.url.replace("unix://", "unix://alice:secret@") + "?db=3", timeout_s=30.0)
    mallory = connect(own_redis.url.replace("unix://", "unix://alice:wrong@"), timeout_s=30.0)

    await alice.call("SET", "key", "value", "EX", 10)

    assert await alice.call("ACL", "WHOAMI") == "alice"
    assert await admin.call("GET", "key") is None
    with pytest.raises(RedisUnavailable, match=r"WRONGPASS|invalid username-password"):
        await mallory.call("PING")
    for connection in (admin, alice, mallory):
        await connection.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _start(command: list[str], folder: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder)


@pytest.mark.timeout(180)
async def test_sentinel_names_the_primary(redis_server_binary: str) -> None:
    with tempfile.TemporaryDirectory(prefix="pdserve-") as folder:
        primary_port, sentinel_port = _free_port(), _free_port()
        configuration = Path(folder) / "sentinel.conf"
        configuration.write_text(f"port {sentinel_port}\nsentinel monitor main 127.0.0.1 {primary_port} 1\n")
        commands = [
            [redis_server_binary, "--port", str(primary_port), "--save", "", "--bind", "127.0.0.1"],
            [redis_server_binary, str(configuration), "--sentinel"],
        ]
        processes = [_start(command, folder) for command in commands]
        redis = connect(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel_port}/main/2")
        try:
            async with asyncio.timeout(100):
                while True:
                    try:
                        await redis.call("SET", "key", "value", "EX", 600)
                        break
                    except RedisUnavailable:
                        await asyncio.sleep(0.05)

            direct = connect(f"redis://127.0.0.1:{primary_port}/2", timeout_s=30.0)
            assert await direct.call("GET", "key") == "value"
            await direct.close()
        finally:
            await redis.close()
            for process in processes:
                process.kill()
                process.wait(timeout=30)


@pytest.mark.timeout(180)
async def test_after_a_fail_over_the_new_primary_is_asked(redis_server_binary: str) -> None:
    """C168: the address in use is asked for again once it stops working."""
    with tempfile.TemporaryDirectory(prefix="pdserve-") as folder:
        first, second, sentinel_port = _free_port(), _free_port(), _free_port()
        configuration = Path(folder) / "sentinel.conf"
        configuration.write_text(f"port {sentinel_port}\nsentinel monitor main 127.0.0.1 {first} 1\n")
        server = [redis_server_binary, "--save", "", "--bind", "127.0.0.1", "--port"]
        processes = [
            _start([*server, str(first)], folder),
            _start([*server, str(second), "--replicaof", "127.0.0.1", str(first)], folder),
        ]
        redis = connect(f"redis+sentinel://127.0.0.1:{sentinel_port}/main/0")
        try:
            async with asyncio.timeout(100):
                await _until_replicated(first)  # a sentinel that finds no replica looks again in 10 s
                processes.append(_start([redis_server_binary, str(configuration), "--sentinel"], folder))
                await _until_set(redis, "before")
                await _fail_over(sentinel_port)
                processes[0].kill()
                await _until_set(redis, "after")

            direct = connect(f"redis://127.0.0.1:{second}/0", timeout_s=30.0)
            assert await direct.call("GET", "key") == "after"
            await direct.close()
        finally:
            await redis.close()
            for process in processes:
                process.kill()
                process.wait(timeout=30)


async def _until_set(redis: RedisConnection, value: str) -> None:
    while True:
        try:
            await redis.call("SET", "key", value, "EX", 600)
        except RedisUnavailable:
            await asyncio.sleep(0.05)
        else:
            return


async def _until_replicated(port: int) -> None:
    direct = connect(f"redis://127.0.0.1:{port}/0")
    reply = None
    while reply is None or "online" not in str(reply):
        try:
            reply = await direct.call("INFO", "replication")
        except RedisUnavailable:
            reply = None
        await asyncio.sleep(0.05)
    await direct.close()


async def _fail_over(sentinel_port: int) -> None:
    reply = b""
    while not reply.startswith(b"+OK"):  # the replica is found, and found good, in its own time
        reader, writer = await asyncio.open_connection("127.0.0.1", sentinel_port)
        writer.write(b"SENTINEL FAILOVER main\r\n")
        reply = await reader.readline()
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.2)


async def test_a_cancellation_that_comes_with_the_answer_is_not_lost(redis: RedisConnection) -> None:
    async def call_forever() -> None:
        while True:
            await redis.call("PING")

    for num_turns in range(60):
        async with asyncio.timeout(30):
            calling = asyncio.ensure_future(call_forever())
            for _ in range(num_turns):
                await asyncio.sleep(0)
            calling.cancel()
            await asyncio.wait((calling,), timeout=25)
            was_cancelled = calling.cancelled()
            calling.cancel()
            await asyncio.wait((calling,), timeout=10)

        assert was_cancelled


async def test_a_burst_of_calls_waits_for_its_turn(redis: RedisConnection) -> None:
    answers = await asyncio.gather(*(redis.call("ECHO", number) for number in range(300)))

    assert answers == [str(number) for number in range(300)]
