"""Whatever else is done with a socket, the port hears every message, in order."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from pdserve.kvtransfer.message_port import MessagePort
from pdserve.kvtransfer.sockets import NEVER_MS, open_monitor

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


async def test_what_came_before_the_end_of_a_connection_is_read_however_long_that_takes():
    with zmq.asyncio.Context() as context:
        plain = zmq.Context.shadow(context.underlying)
        with plain.socket(zmq.ROUTER) as router, plain.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
            monitor = open_monitor(context, dealer, zmq.EVENT_DISCONNECTED)
            dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
            dealer.send(b"hello")
            assert await asyncio.to_thread(router.poll, 30_000)
            identity, _ = router.recv_multipart()
            for number in range(NUM_MESSAGES):
                router.send_multipart([identity, b"%d" % number])
            router.close(linger=30_000)
            await asyncio.wait_for(monitor.recv_multipart(), 30)
            heard = []

            def hear(frames):
                time.sleep(0.005)  # work, of which each message makes some
                heard.append(frames[-1].bytes)

            port = MessagePort(dealer)
            reading = asyncio.create_task(port.run(hear), name="read")
            await port.wait_all_read()
            reading.cancel()
            await asyncio.wait({reading})
            dealer.disable_monitor()
            monitor.close(linger=0)

    assert heard == [b"%d" % number for number in range(NUM_MESSAGES)]


async def test_a_port_that_nobody_reads_is_not_waited_for_for_ever():
    with zmq.Context() as context, context.socket(zmq.DEALER) as far, context.socket(zmq.DEALER) as near:
        near.connect(f"tcp://127.0.0.1:{far.bind_to_random_port('tcp://127.0.0.1')}")
        far.send(b"unread")
        assert await asyncio.to_thread(near.poll, 30_000)

        await asyncio.wait_for(MessagePort(near).wait_all_read(), 30)

        assert near.recv() == b"unread"
