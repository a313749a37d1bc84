import asyncio

import pytest

from pdserve.kvtransfer.task_set import TaskSet


async def test_close_ends_every_task_and_the_watch():
    tasks = TaskSet()
    task = tasks.spawn(asyncio.Event().wait(), name="waits")
    watching = asyncio.ensure_future(tasks.watch())

    await tasks.close(1.0)

    assert task.cancelled()
    await asyncio.wait_for(watching, 30)


async def test_a_failure_is_seen_by_who_watches():
    async def fail():
        raise KeyError("defect")

    tasks = TaskSet()
    tasks.spawn(fail(), name="fails")

    with pytest.raises(RuntimeError) as caught:
        await asyncio.wait_for(tasks.watch(), 30)
    assert isinstance(caught.value.__cause__, KeyError)


async def test_a_task_that_does_not_end_does_not_hold_up_the_close():
    release = asyncio.Event()

    async def stubborn():
        try:
            await release.wait()
        except asyncio.CancelledError:
            await release.wait()
            raise

    tasks = TaskSet()
    task = tasks.spawn(stubborn(), name="stubborn")
    await asyncio.sleep(0)

    async with asyncio.timeout(30):
        await tasks.close(0.05)

    assert not task.done()
    release.set()
    await asyncio.wait({task}, timeout=30)
    assert task.done()
