"""The first failure of a task group by itself: callers handle errors, not groups of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def first_failure() -> AsyncIterator[None]:
    """Run a task group in the body; when it fails, raise what failed first."""
    try:
        yield
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
