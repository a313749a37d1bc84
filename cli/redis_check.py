"""Whether an external Redis can be used, asked before anything slow is started."""

import asyncio

from pdserve.cli.errors import SettingError
from pdserve.control.errors import RedisUnavailable
from pdserve.control.redis_connection import Script, connect

_TIMEOUT_S = 3.0
_LONGEST_REASON = 160  # characters: redis-py may name whole connection pools
_HARMLESS = Script("return 1")  # scripts are all that is run there


def check_redis(url: str) -> None:
    """Run a script in the Redis at `url`.

    Raises:
        SettingError: it does not answer, or refuses; the text has no password.
    """
    asyncio.run(_check(url))


async def _check(url: str) -> None:
    try:
        redis = connect(url, _TIMEOUT_S)
        try:
            await redis.run(_HARMLESS, (), ())
        finally:
            await redis.close()
    except (RedisUnavailable, TypeError, ValueError) as error:  # the last two of a query that redis-py does not know
        reason = str(error).removeprefix("script: ").rstrip(".")[:_LONGEST_REASON]
        raise SettingError(
            f"--redis-url (env REDIS_URL): this Redis cannot be used ({reason}); start it, correct the URL, "
            "or give none: `pdserve serve` then brings its own"
        ) from None
