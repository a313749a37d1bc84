"""Calls from a thread are made by the event loop: all of them, in order, and none that comes too late."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from pdserve.engine.loop_bell import LoopBell

_DEADLINE_S = 60


async def _in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    await asyncio.to_thread(thread.join, _DEADLINE_S)
    assert not thread.is_alive()


async def test_calls_are_made_in_order_by_the_loop() -> None:
    made: list[tuple[int, int]] = []
    all_made = asyncio.Event()

    def note(number: int) -> None:
        made.append((number, threading.get_ident()))
        if number == 4_999:
            all_made.set()

    with LoopBell.open() as bell:
        ringing = asyncio.create_task(_in_thread(lambda: [bell.call(note, number) for number in range(5_000)] and None))
        async with asyncio.timeout(_DEADLINE_S):
            await all_made.wait()
        await ringing

    assert made == [(number, threading.get_ident()) for number in range(5_000)]


async def test_each_of_many_rings_wakes_a_loop_that_waits() -> None:
    answers: asyncio.Queue[int] = asyncio.Queue()
    may_ring = threading.Semaphore(0)

    def ring() -> None:
        for number in range(500):
            assert may_ring.acquire(timeout=_DEADLINE_S)
            bell.call(answers.put_nowait, number)

    with LoopBell.open() as bell:
        ringing = asyncio.create_task(_in_thread(ring))
        async with asyncio.timeout(_DEADLINE_S):
            for number in range(500):
                may_ring.release()
                assert await answers.get() == number
        await ringing


async def test_a_call_that_fails_is_reported_and_keeps_no_other_from_being_made() -> None:
    made: list[str] = []
    reported: list[BaseException] = []

    def report(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        reported.append(context["exception"])

    def fail(_: str) -> None:
        raise ZeroDivisionError

    asyncio.get_running_loop().set_exception_handler(report)
    with LoopBell.open() as bell:
        bell.call(fail, "")
        bell.call(made.append, "after it")
        async with asyncio.timeout(_DEADLINE_S):
            while not made:  # noqa: ASYNC110 (the loop has nothing to say of its own turns)
                await asyncio.sleep(0)

    assert made == ["after it"]
    assert [type(error) for error in reported] == [ZeroDivisionError]


async def test_a_call_after_the_end_is_forgotten() -> None:
    made: list[str] = []
    with LoopBell.open() as bell:
        pass

    bell.call(made.append, "too late")
    await asyncio.sleep(0)

    assert made == []
