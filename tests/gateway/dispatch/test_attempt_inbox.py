"""The inbox of one attempt: nothing is lost, doubled or reordered, whether or not somebody hears at the moment."""

import asyncio

import pytest

from pdserve.control.messages import Stage, StageReport
from pdserve.gateway.attempt_inbox import AttemptEvent, AttemptInbox, NodeLost
from pdserve.gateway.errors import ProtocolViolation
from pdserve.gateway.node_view import NodeKey

KEY = NodeKey("n1", "i1")
SAID = AttemptEvent(KEY, StageReport("r:1", Stage.DECODING))


def _lost(number: int) -> AttemptEvent:
    return AttemptEvent(KEY, NodeLost(str(number)))


def _number(event: AttemptEvent) -> int:
    assert isinstance(event.message, NodeLost)
    return int(event.message.reason)


async def test_every_event_is_heard_once_and_in_order_across_pauses() -> None:
    inbox = AttemptInbox("r:1", (KEY,), capacity=100)
    heard: list[int] = []

    def take(event: AttemptEvent) -> bool:
        heard.append(_number(event))
        return heard[-1] % 3 == 0  # then those behind it wait

    async def hear() -> None:
        while len(heard) < 31:
            await inbox.hear(30, take)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hear(), name="hear")
        for number in range(31):
            inbox.put(_lost(number))
            if number % 4 == 0:
                await asyncio.sleep(0)

    assert heard == list(range(31))


async def test_what_nobody_hears_is_bounded_with_room_for_the_loss_of_the_node() -> None:
    inbox = AttemptInbox("r:1", (KEY,), capacity=2)
    for _ in range(2):
        inbox.put(SAID)
    inbox.put(_lost(0))
    heard: list[AttemptEvent] = []

    def take(event: AttemptEvent) -> bool:
        heard.append(event)
        return len(heard) == 3

    await inbox.hear(30, take)
    assert heard == [SAID, SAID, _lost(0)]
    for _ in range(3):
        inbox.put(SAID)
    with pytest.raises(ProtocolViolation):
        await inbox.hear(30, take)


async def test_silence_ends_and_what_comes_later_is_kept() -> None:
    inbox = AttemptInbox("r:1", (KEY,), capacity=2)
    with pytest.raises(TimeoutError):
        await inbox.hear(0, lambda event: True)

    inbox.put(SAID)
    await inbox.hear(30, lambda event: True)
    inbox.close()
