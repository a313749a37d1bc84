"""What a receiver said before it closed is heard, although the end of its connection is known first."""

import asyncio

import zmq
import zmq.asyncio

from pdserve.kvtransfer.sockets import NEVER_MS, wait_all_read

NUM_MESSAGES = 500


async def test_what_arrived_before_the_connection_ended_is_read_first():
    with zmq.asyncio.Context() as context:
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        await dealer.send(b"hello")
        identity, _ = await asyncio.wait_for(router.recv_multipart(), 30)
        for number in range(NUM_MESSAGES):
            await router.send_multipart([identity, str(number).encode()])
        router.close(linger=10_000)
        await asyncio.wait_for(monitor.recv_multipart(), 30)
        heard = []

        async def read():
            while True:
                heard.append(await dealer.recv())
                await asyncio.sleep(0)  # as a reader that has work with each

        reader = asyncio.create_task(read(), name="read")
        await wait_all_read(dealer)

        assert heard == [str(number).encode() for number in range(NUM_MESSAGES)]
        reader.cancel()
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close(linger=0)


async def test_a_reader_that_does_not_read_is_not_waited_for_forever():
    with zmq.asyncio.Context() as context:
        left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        left.bind("inproc://last-words")
        right.connect("inproc://last-words")
        await left.send(b"unread")
        await asyncio.wait_for(right.poll(), 30)

        await asyncio.wait_for(wait_all_read(right), 30)

        assert await right.recv() == b"unread"
        left.close(linger=0)
        right.close(linger=0)
