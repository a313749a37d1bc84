"""How this installation reaches Redis: every URL form, short timeouts, one typed error.

Connecting is lazy, so a Redis that is absent at start is not fatal; a pool reconnects (and asks Sentinel
again) by itself once Redis is back.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, cast
from urllib.parse import parse_qs, unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from pdserve.control.errors import RedisUnavailable
from pdserve.control.script_connections import ConnectionPool, ScriptConnections, Word

# A script that begins with this has Redis' own clock, in milliseconds, as `now`.
LUA_NOW_MS = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"

_TIMEOUT_S = 2.0
_TURN_TIMEOUTS = 3  # a call may wait for its turn so many times longer than for its answer
_HEALTH_CHECK_S = 10
_MAX_CONNECTIONS = 32
_SENTINEL_PORT = 26379
_SCHEMES = ("redis", "rediss", "unix")
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
_SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")


class _Client(Protocol):
    """The part of redis-py's client that is used."""

    connection_pool: ConnectionPool

    async def execute_command(self, *args: Word) -> Any: ...

    async def aclose(self) -> None: ...


class Script:
    """A Lua script and its digest. A retry may run it twice, so that must be harmless."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


ScriptCall = tuple[Sequence[str], Sequence[Word]]  # keys, arguments


class RedisConnection:
    """A pool of connections to one Redis; every call is bounded in time and fails as RedisUnavailable."""

    def __init__(self, client: _Client, timeout_s: float, sentinels: tuple[_Client, ...] = ()) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._sentinels = sentinels
        self._scripts = ScriptConnections(client.connection_pool)
        # redis-py's pool fails at once when it has no connection left: calls wait here for their turn.
        self._turns = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def call(self, *command: Word) -> Any:
        """Return Redis' answer to one command."""
        async with self._bounded(str(command[0])):
            return await self._client.execute_command(*command)

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Word]) -> Any:
        """Return what `script` returns; its source is sent only to a Redis that does not know it yet."""
        (answer,) = await self.run_each(script, ((keys, arguments),))
        return answer

    async def run_each(self, script: Script, calls: Sequence[ScriptCall]) -> list[Any]:
        """Return what `script` returns for each of `calls`, which cost one round trip together."""
        tails = [(len(keys), *keys, *arguments) for keys, arguments in calls]
        async with self._bounded("script"):
            answers = await self._scripts.ask([("EVALSHA", script.digest, *tail) for tail in tails])
            for position, tail in enumerate(tails):
                if isinstance(answers[position], NoScriptError):
                    (answers[position],) = await self._scripts.ask([("EVAL", script.source, *tail)])
                if isinstance(answers[position], Exception):
                    raise answers[position]
            return answers

    async def close(self) -> None:
        """Close every connection."""
        for client in (self._client, *self._sentinels):
            await client.aclose()

    @asynccontextmanager
    async def _bounded(self, what: str) -> AsyncIterator[None]:
        task = asyncio.current_task()
        num_cancels = task.cancelling() if task is not None else 0
        try:
            if self._turns.locked():
                async with asyncio.timeout(_TURN_TIMEOUTS * self._timeout_s):
                    await self._turns.acquire()
            else:
                await self._turns.acquire()  # at once
            try:
                async with asyncio.timeout(self._timeout_s):
                    yield
            finally:
                self._turns.release()
        except TimeoutError as error:
            raise RedisUnavailable(f"{what}: no answer from Redis within {self._timeout_s:g} s") from error
        except (RedisError, OSError) as error:
            raise RedisUnavailable(f"{what}: {error}") from error
        # Where it has a timeout of its own, as for Sentinels, redis-py waits with asyncio.wait_for, which before Python
        # 3.12 loses a cancellation that comes together with the answer.
        if task is not None and task.cancelling() > num_cancels:
            raise asyncio.CancelledError


def connect(url: str, timeout_s: float = _TIMEOUT_S) -> RedisConnection:
    """Return a connection for `url`; nothing is sent yet. `timeout_s` bounds each later call once it has its turn.

    Forms: `redis://`, `rediss://`, `unix://` with ACL user and database as redis-py reads them, and
    `redis+sentinel://[user:password@]host1[:port],host2[:port]/service[/db]` (`rediss+sentinel://` for TLS to the
    Redis), whose query may give `sentinel_username`, `sentinel_password`, `sentinel_ssl=true` for TLS to the Sentinels,
    and for both kinds of TLS `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` and `ssl_cert_reqs` as `rediss://` has them.

    Raises:
        ValueError: the URL is of none of these forms.
    """
    scheme = url.partition("://")[0]
    if scheme in _SENTINEL_SCHEMES:
        client, sentinels = _sentinel_clients(url, timeout_s)
        return RedisConnection(client, timeout_s, sentinels)
    if scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in (*_SCHEMES, *_SENTINEL_SCHEMES))
        raise ValueError(f"a Redis URL begins with one of {known}")
    return RedisConnection(cast(_Client, Redis.from_url(url, **_options(timeout_s))), timeout_s)


def _options(timeout_s: float) -> dict[str, Any]:
    # One retry, and only of a connection that turned out dead (an idle one after a restart). A timeout is not
    # retried: the caller's second is over. Every script here gives the same result when it is run twice.
    retry = Retry(ExponentialBackoff(cap=0.2, base=0.02), 1, supported_errors=(RedisConnectionError,))
    return {
        "decode_responses": True,
        "socket_timeout": None,  # a task and two timers for each command; `_bounded` has one for all of them
        "socket_connect_timeout": timeout_s,
        "health_check_interval": _HEALTH_CHECK_S,
        "max_connections": _MAX_CONNECTIONS + ScriptConnections.MAX_KEPT,
        "retry": retry,
    }


def _sentinel_clients(url: str, timeout_s: float) -> tuple[_Client, tuple[_Client, ...]]:
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not hosts or not service:
        raise ValueError("a Sentinel URL is redis+sentinel://host1:port,host2:port/service[/db]")
    username, _, password = credentials.partition(":")
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    tls = {name: query[name] for name in _TLS_OPTIONS if name in query}
    has_tls, sentinels_have_tls = parts.scheme.startswith("rediss"), query.get("sentinel_ssl") == "true"
    sentinel_kwargs: dict[str, Any] = {
        "socket_timeout": timeout_s / 2,
        "socket_connect_timeout": timeout_s / 2,
        "retry": Retry(NoBackoff(), 0),  # the next Sentinel of the list is the retry
        "username": query.get("sentinel_username"),
        "password": query.get("sentinel_password"),
        "ssl": sentinels_have_tls,
        **(tls if sentinels_have_tls else {}),
    }
    sentinel = Sentinel(  # type: ignore[no-untyped-call]  # redis-py leaves it without annotations
        [_host_and_port(host) for host in hosts.split(",")],
        sentinel_kwargs=sentinel_kwargs,
        **_options(timeout_s),
        ssl=has_tls,
        **(tls if has_tls else {}),
        db=int(database or 0),
        username=unquote(username) or None,
        password=unquote(password) or None,
    )
    watchers = tuple(cast(_Client, watcher) for watcher in sentinel.sentinels)
    return cast(_Client, sentinel.master_for(service)), watchers


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"no host in {text!r}")
    return parts.hostname, parts.port or _SENTINEL_PORT
