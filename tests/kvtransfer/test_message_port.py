"""Whatever else is done with a socket, the port hears every message, in order."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from pdserve.kvtransfer.message_port import MessagePort

NUM_MESSAGES = 300


class Ends:
    """A ROUTER with a port that reads it, and a DEALER that writes to it."""

    def __init__(self, port, dealer):
        self.port = port
        self.dealer = dealer
        self.heard = []
        self._all = asyncio.Event()

    def hear(self, frames):
        self.heard.append(frames[-1].bytes)
        if len(self.heard) == NUM_MESSAGES:
            self._all.set()

    async def heard_all(self):
        await asyncio.wait_for(self._all.wait(), 30)
        assert self.heard == [str(number).encode() for number in range(NUM_MESSAGES)]


@asynccontextmanager
async def _ends():
    with zmq.Context() as context:
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        ends = Ends(MessagePort(router), dealer)
        reading = asyncio.create_task(ends.port.run(ends.hear), name="read")
        try:
            yield ends
        finally:
            reading.cancel()
            await asyncio.wait({reading})
            router.close(linger=0)
            dealer.close(linger=0)


async def test_messages_that_come_one_at_a_time_are_heard():
    async with _ends() as ends:
        for number in range(NUM_MESSAGES):
            ends.dealer.send(str(number).encode())
            await asyncio.sleep(0)

        await ends.heard_all()


async def test_a_burst_is_heard_to_its_end():
    async with _ends() as ends:
        for number in range(NUM_MESSAGES):
            ends.dealer.send(str(number).encode())

        await ends.heard_all()


async def test_a_send_that_fails_takes_no_message_away():
    async with _ends() as ends:
        for number in range(NUM_MESSAGES):
            ends.dealer.send(str(number).encode())
            with pytest.raises(zmq.ZMQError):
                ends.port.send([b"nobody", b"hello"])
            await asyncio.sleep(0)

        await ends.heard_all()


async def test_what_has_arrived_is_read_before_the_wait_ends():
    async with _ends() as ends:
        for number in range(NUM_MESSAGES):
            ends.dealer.send(str(number).encode())
        ends.dealer.close(linger=30_000)

        async with asyncio.timeout(30):
            while len(ends.heard) < NUM_MESSAGES:
                await ends.port.wait_all_read()
                await asyncio.sleep(0)

        await ends.heard_all()
