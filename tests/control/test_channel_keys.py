"""Who is heard on the control plane, and who hears: holders of the key, in words that nobody else can read."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from pdserve.control.channel import ControlClient, ControlServer, CurveKeys
from pdserve.control.codec import encode
from pdserve.control.errors import ChannelLost
from pdserve.control.messages import CancelTask, Ping, Stage, StageReport
from pdserve.control.node_conversation import NodeConversation
from pdserve.kvtransfer.curve_keys import generate_keys
from pdserve.kvtransfer.sockets import present

SECRET_WORDS = "the attempt whose name nobody else may read"


@asynccontextmanager
async def wiretap(endpoint: str) -> AsyncIterator[tuple[str, bytearray]]:
    """Pass bytes between one who connects and `endpoint`; yield the address of the tap and all that was said."""
    heard = bytearray()
    host, port = endpoint.removeprefix("tcp://").split(":")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65536):
            heard.extend(chunk)
            writer.write(chunk)
            await writer.drain()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
        ways = {asyncio.create_task(copy(*way)) for way in ((reader, onward_writer), (onward_reader, writer))}
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for each in (writer, onward_writer):
            each.transport.abort()
        await asyncio.gather(*ways, return_exceptions=True)
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    async with server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", heard
        await asyncio.wait_for(ended.wait(), 30)


@pytest.mark.parametrize("keys", [None, generate_keys()], ids=["clear", "keys"])
async def test_what_is_said_under_keys_cannot_be_read_on_the_way(
    context: zmq.asyncio.Context, keys: CurveKeys | None
) -> None:
    async with (
        ControlServer.listening(context, "tcp://127.0.0.1:0", keys) as server,
        wiretap(server.endpoint) as (endpoint, heard),
        NodeConversation.open(context, endpoint, keys, 30.0) as node,
    ):
        node.say(CancelTask(SECRET_WORDS, "test"))
        peer, message = await asyncio.wait_for(server.recv(), 30)
        await server.send(peer, StageReport(SECRET_WORDS[::-1], Stage.DECODING))
        answer = await node.hear(30)

    assert message == CancelTask(SECRET_WORDS, "test")
    assert answer == StageReport(SECRET_WORDS[::-1], Stage.DECODING)
    assert (SECRET_WORDS.encode() in heard) == (keys is None)
    assert (SECRET_WORDS[::-1].encode() in heard) == (keys is None)


async def until_refused(server: ControlServer) -> None:
    for _ in range(3_000):
        if server.num_refused:
            return
        await asyncio.sleep(0.01)  # libzmq tells of it when it likes
    raise AssertionError("no refusal was counted")


OURS, THEIRS = generate_keys(), generate_keys()


@pytest.mark.parametrize(
    ("node_keys", "caller_keys"), [(OURS, None), (OURS, THEIRS), (None, OURS)], ids=["no key", "another", "one only"]
)
async def test_who_does_not_share_the_key_is_told_so_and_counted_and_not_heard(
    context: zmq.asyncio.Context, node_keys: CurveKeys | None, caller_keys: CurveKeys | None
) -> None:
    async with ControlServer.listening(context, "tcp://127.0.0.1:0", node_keys) as server:
        async with NodeConversation.open(context, server.endpoint, caller_keys, 30.0) as node:
            node.say(CancelTask("r:1", "a stranger's"))
            for _ in range(2):
                with pytest.raises(ChannelLost, match="perhaps the keys of both ends differ, or one has none"):
                    await node.hear(30)
                node.say(Ping("g", 1))
            assert node.was_refused

        async with NodeConversation.open(context, server.endpoint, node_keys, 30.0) as node:
            node.say(Ping("ours", 1))
            _, message = await asyncio.wait_for(server.recv(), 30)

        assert message == Ping("ours", 1)  # and not what came before it
        await until_refused(server)
    assert server.num_malformed == 0


async def test_a_key_that_is_not_listed_is_no_key(context: zmq.asyncio.Context) -> None:
    """A caller that knows the node's public key, and so gets as far as the authenticator, is refused there."""
    gateway, node_pair = generate_keys(), generate_keys()
    keys = CurveKeys.from_secret(node_pair.secret_key, [gateway.public_key])
    async with ControlServer.listening(context, "tcp://127.0.0.1:0", keys) as server:
        for caller in (THEIRS, gateway):
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                present(dealer, caller, node_pair.public_key)
                dealer.connect(server.endpoint)
                await dealer.send(encode(Ping(caller.public_key, 1)))
                if caller is gateway:
                    _, message = await asyncio.wait_for(server.recv(), 30)
                else:
                    await until_refused(server)

    assert message == Ping(gateway.public_key, 1)


async def test_a_flood_of_strangers_reaches_nobody_and_holds_nobody_up(context: zmq.asyncio.Context) -> None:
    async with ControlServer.listening(context, "tcp://127.0.0.1:0", OURS) as server:
        strangers = [context.socket(zmq.DEALER) for _ in range(20)]
        try:
            for stranger in strangers:
                stranger.linger = 0
                stranger.connect(server.endpoint)
                with contextlib.suppress(zmq.Again):
                    for _ in range(20):
                        await stranger.send(encode(CancelTask("r:1", "x" * 50_000)), flags=zmq.NOBLOCK)

            async with NodeConversation.open(context, server.endpoint, OURS, 30.0) as node:
                node.say(Ping("ours", 1))
                peer, message = await asyncio.wait_for(server.recv(), 30)
                await server.send(peer, StageReport("r:1", Stage.DECODING))
                assert await node.hear(30) == StageReport("r:1", Stage.DECODING)
        finally:
            for stranger in strangers:
                stranger.close(linger=0)

    assert message == Ping("ours", 1) and server.num_malformed == 0


async def test_nobody_at_the_address_is_something_else_than_a_refusal(context: zmq.asyncio.Context) -> None:
    with socket.create_server(("127.0.0.1", 0)) as was_here:  # libzmq would close it a moment later
        port = was_here.getsockname()[1]
    client = ControlClient.connect(context, f"tcp://127.0.0.1:{port}", 10.0, OURS)

    await asyncio.wait_for(client.watch(), 30)

    assert (client.why_lost, client.was_refused) == ("nobody answers", False)
    client.close()
