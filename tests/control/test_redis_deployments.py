"""The kinds of Redis that people run: behind TLS, with ACL users, and under Sentinel, with a real failover."""

import asyncio
import contextlib
import secrets
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import trustme

from pdserve.control.errors import RedisUnavailable
from pdserve.control.redis_connection import Script, connect

_PASSWORD = "p@ss/word:1"  # what has to be quoted in a URL
_QUOTED = "p%40ss%2Fword%3A1"
_COUNT_UP = Script("return redis.call('INCR', KEYS[1])")


class Servers:
    """redis-server processes on free ports of loopback, each with a folder of its own."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._binary = binary
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *lines: str, is_sentinel: bool = False) -> int:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port: int = probe.getsockname()[1]
        folder = self._folder / secrets.token_hex(4)
        folder.mkdir()
        config = folder / "redis.conf"
        config.write_text("\n".join((f"port {port}", "bind 127.0.0.1", f'dir "{folder}"', *lines)) + "\n")
        command = [self._binary, str(config), *(["--sentinel"] if is_sentinel else [])]
        self._processes[port] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        return port

    def kill(self, port: int) -> None:
        process = self._processes.pop(port)
        process.kill()
        process.wait(timeout=30)

    def kill_all(self) -> None:
        for port in list(self._processes):
            self.kill(port)


@pytest.fixture
def servers(redis_server_binary: str, tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(redis_server_binary, tmp_path)
    yield servers
    servers.kill_all()


async def _answered(url: str, *command: str | int, enough: Callable[[object], bool] = lambda _: True) -> object:
    """Ask again until there is an answer that is `enough`."""
    connection = connect(url)
    try:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(RedisUnavailable):
                    if enough(answer := await connection.call(*command)):
                        return answer
                await asyncio.sleep(0.05)
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def _tls_before(port: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    """A relay that speaks TLS on its port and plain TCP to `port`: the server binary at hand may be built without."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server, from_here = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(reader, from_here), name="to redis")
            group.create_task(_copy(to_server, writer), name="from redis")

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


def _certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    ca_file = folder / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    return context, ca_file


async def test_an_acl_user_with_a_quoted_password_and_a_database(servers: Servers) -> None:
    port = servers.start(f"user pdserve on >{_PASSWORD} ~* +@all", "user default off")
    url = f"redis://pdserve:{_QUOTED}@127.0.0.1:{port}/3"

    assert await _answered(url, "SET", "key", "here")

    assert await _answered(f"redis://pdserve:{_QUOTED}@127.0.0.1:{port}/0", "EXISTS", "key") == 0
    stranger = connect(f"redis://pdserve:wrong@127.0.0.1:{port}/3", timeout_s=30.0)
    with pytest.raises(RedisUnavailable, match=r"WRONGPASS|invalid username-password"):
        await stranger.call("PING")
    await stranger.close()


async def test_tls_with_a_private_authority(servers: Servers, tmp_path: Path) -> None:
    port = servers.start(f"requirepass {_PASSWORD}")
    context, ca_file = _certificate(tmp_path)
    async with _tls_before(port, context) as tls_port:
        url = f"rediss://:{_QUOTED}@localhost:{tls_port}/0"
        connection = connect(f"{url}?ssl_ca_certs={quote(str(ca_file))}", timeout_s=30.0)
        await _answered(f"redis://:{_QUOTED}@127.0.0.1:{port}/0", "PING")
        assert [await connection.run(_COUNT_UP, ["n"], []) for _ in range(3)] == [1, 2, 3]
        await connection.close()

        distrustful = connect(url, timeout_s=30.0)
        with pytest.raises(RedisUnavailable, match=r"(?i)certificate"):
            await distrustful.call("PING")
        await distrustful.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("with_tls", [False, True])
async def test_sentinel_leads_to_the_master_and_after_its_death_to_the_next(
    servers: Servers, tmp_path: Path, with_tls: bool
) -> None:
    """What was written stays, and nobody has to be started again. The replicas are reached directly, or by TLS."""
    async with contextlib.AsyncExitStack() as stack:
        context, ca_file = _certificate(tmp_path)
        ports = [servers.start(*_node_lines()), 0]
        ports[1] = servers.start(*_node_lines(), f"replicaof 127.0.0.1 {ports[0]}")
        sentinel = servers.start(*_sentinel_lines(ports[0]), is_sentinel=True)
        url = f"redis+sentinel://:{_QUOTED}@127.0.0.1:{sentinel}/mymaster/2"
        if with_tls:
            tls_port = await stack.enter_async_context(_tls_before(sentinel, context))
            query = f"sentinel_ssl=true&ssl_ca_certs={quote(str(ca_file))}"
            url = f"redis+sentinel://:{_QUOTED}@localhost:{tls_port}/mymaster/2?{query}"
        assert await _answered(url, "SET", "key", "kept")
        connection = connect(url, timeout_s=10.0)
        assert await connection.call("GET", "key") == "kept"
        replica = f"redis://:{_QUOTED}@127.0.0.1:{ports[1]}/2"
        await _answered(replica, "GET", "key", enough=lambda value: value == "kept")
        to_sentinel = f"redis://127.0.0.1:{sentinel}"
        await _answered(to_sentinel, "SENTINEL", "replicas", "mymaster", enough=bool)

        servers.kill(ports[0])
        assert await _answered(to_sentinel, "SENTINEL", "SET", "mymaster", "down-after-milliseconds", 500)

        async with asyncio.timeout(120):
            while True:
                with contextlib.suppress(RedisUnavailable):
                    assert await connection.run(_COUNT_UP, ["n"], []) >= 1
                    break
                await asyncio.sleep(0.05)
        assert await connection.call("GET", "key") == "kept"
        await connection.close()
        assert await _answered(replica, "EXISTS", "n") == 1


def _node_lines() -> tuple[str, ...]:
    return (f"requirepass {_PASSWORD}", f"masterauth {_PASSWORD}", "repl-diskless-sync-delay 0")


def _sentinel_lines(master_port: int) -> tuple[str, ...]:
    return (  # down is only who has been killed: not who is held up by a busy machine
        f"sentinel monitor mymaster 127.0.0.1 {master_port} 1",
        f"sentinel auth-pass mymaster {_PASSWORD}",
        "sentinel down-after-milliseconds mymaster 60000",
        "sentinel failover-timeout mymaster 5000",
    )
