"""Whoever takes what comes in the moment it comes, without a turn of the event loop, and waits only for the end."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Follower(Generic[T]):
    """Gives each item to `take` until that returns True, or raises: then the one that waits goes on.

    Waking a task costs more than most of what there is to do about a token.
    """

    def __init__(self, take: Callable[[T], bool]) -> None:
        self._take = take
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more."""
        return self._ended.done()

    def put(self, item: T) -> bool:
        """Give `item`; return False if nobody takes it any more. Never raises: the one that waits does."""
        if self._ended.done():
            return False
        try:
            if self._take(item):
                self._ended.set_result(None)
        except Exception as error:
            self.fail(error)
        return True

    def fail(self, error: Exception) -> None:
        """End it: `wait` raises `error`."""
        if not self._ended.done():
            self._ended.set_exception(error)

    async def wait(self) -> None:
        """Return when `take` has had enough.

        Raises:
            Exception: what `take` raised, or what it failed with.
        """
        try:
            await self._ended
        finally:
            if self._ended.done() and not self._ended.cancelled():
                self._ended.exception()  # marks it as seen: who waited may have been cancelled in the same moment
