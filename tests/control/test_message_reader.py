import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from pdserve.control import message_reader
from pdserve.control.message_reader import MessageReader
from pdserve.kvtransfer.sockets import NEVER_MS

_NUM_MESSAGES = 500


class _CountingSocket(zmq.Socket[bytes]):
    """Counts how often it is looked at."""

    num_looks = 0

    def getsockopt(self, option: int) -> Any:
        self.num_looks += 1
        return super().getsockopt(option)


@asynccontextmanager
async def _ends() -> AsyncIterator[tuple[MessageReader, zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    far, near = context.socket(zmq.DEALER), context.socket(zmq.DEALER, socket_class=_CountingSocket)
    near.connect(f"tcp://127.0.0.1:{far.bind_to_random_port('tcp://127.0.0.1')}")
    reader = MessageReader(near)
    try:
        yield reader, near, far
    finally:
        reader.close()
        context.destroy(linger=0)


async def test_messages_come_in_order_whether_they_are_waited_for_or_wait() -> None:
    async with _ends() as (reader, _, far):
        for number in range(_NUM_MESSAGES):
            far.send_multipart([b"%d" % number, b"tail"])
            if number % 7 == 0:
                await asyncio.sleep(0)

        heard = [await asyncio.wait_for(reader.recv(), 30) for _ in range(_NUM_MESSAGES)]

        assert heard == [[b"%d" % number, b"tail"] for number in range(_NUM_MESSAGES)]


async def test_a_message_whose_note_a_send_took_away_is_not_missed() -> None:
    async with _ends() as (reader, near, far):
        heard: list[list[bytes]] = []

        async def read() -> None:
            while len(heard) < _NUM_MESSAGES:
                heard.append(await reader.recv())

        reading = asyncio.create_task(read(), name="reader")
        for number in range(_NUM_MESSAGES):
            far.send(b"%d" % number)
            near.send(b"answer")
            reader.look()
            await asyncio.sleep(0)

        await asyncio.wait_for(reading, 30)
        assert heard == [[b"%d" % number] for number in range(_NUM_MESSAGES)]


async def test_others_have_their_turn_while_messages_pour_in() -> None:
    async with _ends() as (reader, _, far):
        for number in range(_NUM_MESSAGES):
            far.send(b"%d" % number)
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(take_turns(), name="other")
        async with asyncio.timeout(30):
            for _ in range(_NUM_MESSAGES):
                await reader.recv()
        other.cancel()

        assert turns >= _NUM_MESSAGES // 8 - 1


@pytest.mark.parametrize("is_slow", [False, True])
async def test_what_arrived_before_the_connection_ended_is_read_first(
    monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """What a node said before it closed is heard, although the end of its connection is known first; however long all
    of it takes: what has a limit is the wait for a reader that does not read."""
    monkeypatch.setattr(message_reader, "_LAST_READ_S", 0.05 if is_slow else 30.0)
    with zmq.asyncio.Context() as context:
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        reader = MessageReader(zmq.Socket.shadow(dealer.underlying))
        await dealer.send(b"hello")
        identity, _ = await asyncio.wait_for(router.recv_multipart(), 30)
        for number in range(_NUM_MESSAGES):
            await router.send_multipart([identity, b"%d" % number])
        router.close(linger=10_000)
        await asyncio.wait_for(monitor.recv_multipart(), 30)
        heard: list[bytes] = []

        async def read() -> None:
            while True:
                heard.extend(await reader.recv())
                if is_slow:
                    time.sleep(0.002)  # noqa: ASYNC251 - work, of which each message makes some
                await asyncio.sleep(0)

        reading = asyncio.create_task(read(), name="read")
        await reader.wait_all_read()

        assert heard == [b"%d" % number for number in range(_NUM_MESSAGES)]
        reading.cancel()
        reader.close()
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close(linger=0)


async def test_a_reader_that_does_not_read_is_not_waited_for_forever() -> None:
    async with _ends() as (reader, near, far):
        far.send(b"unread")
        await asyncio.to_thread(near.poll, 30_000)

        await asyncio.wait_for(reader.wait_all_read(), 30)

        assert isinstance(near, _CountingSocket) and near.num_looks < 100, "it is waited for, not asked again and again"
        assert await asyncio.wait_for(reader.recv(), 30) == [b"unread"]


async def test_a_follower_hears_each_message_until_it_has_enough_and_the_rest_waits() -> None:
    async with _ends() as (reader, near, far):
        heard: list[bytes] = []

        def take(frames: list[bytes]) -> bool:
            heard.extend(frames)
            near.send(b"answer")  # which may take the note of the next message away
            reader.look()
            return len(heard) == 100

        for number in range(110):
            far.send(b"%d" % number)
        await asyncio.wait_for(reader.follow(take), 30)

        assert heard == [b"%d" % number for number in range(100)]
        assert [await asyncio.wait_for(reader.recv(), 30) for _ in range(10)] == [[b"%d" % n] for n in range(100, 110)]


async def test_what_a_follower_raises_ends_it_and_the_next_message_is_read() -> None:
    async with _ends() as (reader, _, far):
        for content in (b"odd", b"next"):
            far.send(content)

        def take(frames: list[bytes]) -> bool:
            raise ValueError(frames)

        with pytest.raises(ValueError, match="odd"):
            await asyncio.wait_for(reader.follow(take), 30)

        assert await asyncio.wait_for(reader.recv(), 30) == [b"next"]


async def test_no_message_is_lost_by_a_reader_that_is_cancelled_again_and_again() -> None:
    async with _ends() as (reader, _, far):
        heard: list[bytes] = []

        async def read() -> None:
            while True:
                heard.extend(await reader.recv())

        async with asyncio.timeout(60):
            for number in range(_NUM_MESSAGES):
                far.send(b"%d" % number)
                reading = asyncio.create_task(read(), name="read")
                for _ in range(number % 5):
                    await asyncio.sleep(0)
                reading.cancel()
                await asyncio.wait((reading,))
            while len(heard) < _NUM_MESSAGES:
                heard.extend(await reader.recv())

        assert heard == [b"%d" % number for number in range(_NUM_MESSAGES)]
