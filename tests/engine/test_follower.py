import asyncio
import gc

import pytest

from pdserve.engine.follower import Follower


async def test_items_are_taken_at_once_and_in_order_until_it_is_enough() -> None:
    taken: list[int] = []

    def take(item: int) -> bool:
        taken.append(item)
        return item == 2

    follower = Follower(take)
    for item in range(5):
        follower.put(item)

    assert taken == [0, 1, 2] and follower.has_ended
    await follower.wait()


async def test_what_is_raised_reaches_the_one_that_waits_and_not_the_one_that_gives() -> None:
    follower = Follower(lambda item: 1 // item > 1)
    follower.put(1)
    follower.put(0)
    follower.put(1)
    follower.fail(TimeoutError())

    with pytest.raises(ZeroDivisionError):
        await follower.wait()


async def test_a_cancelled_waiter_leaves_no_error_unseen() -> None:
    unseen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
    follower: Follower[int] | None = Follower(lambda item: 1 // item > 1)
    waiting = asyncio.create_task(follower.wait(), name="waits")
    await asyncio.sleep(0)
    follower.put(0)
    waiting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waiting
    follower = waiting = None
    gc.collect()
    assert unseen == []
