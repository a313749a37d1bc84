"""Connections of redis-py to one Redis, kept for scripts: used without what its client does around each command.

That is more than half of what a script costs a gateway: redis-py looks whether the connection still lives, whichever
way it was last used, counts it in and out of its pool, and packs each argument by itself. Here a connection that turns
out dead is made anew at its next use, by the same pool.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

_RETRY_S = 0.02

Word = str | int


class Connection(Protocol):
    """The part of redis-py's connection that is used; what does not return leaves it broken."""

    async def connect(self) -> None: ...

    async def send_packed_command(self, command: Sequence[bytes]) -> None: ...

    async def read_response(self) -> Any: ...


class ConnectionPool(Protocol):
    """The part of redis-py's pool that is used."""

    async def get_connection(self) -> Connection: ...

    async def release(self, connection: Connection) -> None: ...


class ScriptConnections:
    """Owns up to `MAX_KEPT` connections that are idle; those in use are their users'. The pool closes all of them."""

    MAX_KEPT = 4

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._kept: list[Connection] = []

    async def ask(self, commands: Sequence[Sequence[Word]]) -> list[Any]:
        """Return the answer to each of `commands`, sent together; an error that Redis answered is one of the answers.

        They are sent twice if the connection breaks, once if there is no answer in time.

        Raises:
            RedisError: Redis cannot be reached.
        """
        content = b"".join(map(_packed, commands))
        connection = self._kept.pop() if self._kept else await self._pool.get_connection()
        try:
            try:
                return await _exchange(connection, content, len(commands))
            except RedisConnectionError:
                await asyncio.sleep(_RETRY_S)
                return await _exchange(connection, content, len(commands))
        finally:
            if len(self._kept) < self.MAX_KEPT:
                self._kept.append(connection)
            else:
                await self._pool.release(connection)


async def _exchange(connection: Connection, content: bytes, num_answers: int) -> list[Any]:
    await connection.connect()  # where it is broken; to the primary of now, which sending alone would not ask for
    await connection.send_packed_command((content,))
    answers: list[Any] = []
    while len(answers) < num_answers:
        try:
            answers.append(await connection.read_response())
        except ResponseError as error:
            answers.append(error)
    return answers


def _packed(command: Sequence[Word]) -> bytes:
    """Return `command` as Redis' protocol has it: an array of bulk strings."""
    words = [word.encode() if isinstance(word, str) else b"%d" % word for word in command]
    return b"*%d\r\n%b" % (len(words), b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words]))
