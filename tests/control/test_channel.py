import asyncio
import socket

import msgpack
import pytest
import zmq
import zmq.asyncio

from pdserve.control.channel import ControlClient, ControlServer, Peer
from pdserve.control.codec import encode
from pdserve.control.errors import ChannelLost
from pdserve.control.messages import (
    CancelTask,
    FinishReason,
    Ping,
    Stage,
    StageReport,
    TokenBatch,
    TokenChunk,
    TokenLogprobs,
)

HOSTS = ["127.0.0.1", "[::1]"]


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", HOSTS)
async def test_messages_go_both_ways(context: zmq.asyncio.Context, host: str) -> None:
    if host == "[::1]" and not _has_ipv6():
        pytest.skip("no IPv6 here")
    server = ControlServer.bind(context, f"tcp://{host}:0")
    client = ControlClient.connect(context, server.endpoint)

    client.send(Ping("gateway", 1))
    peer, heard = await asyncio.wait_for(server.recv(), 30)
    await server.send(peer, StageReport("r:1", Stage.DECODING))
    answer = await asyncio.wait_for(client.recv(), 30)

    assert server.endpoint.startswith(f"tcp://{host}:")
    assert heard == Ping("gateway", 1)
    assert answer == StageReport("r:1", Stage.DECODING)
    client.close()
    server.close()


async def test_each_connection_is_a_new_peer(context: zmq.asyncio.Context) -> None:
    server = ControlServer.bind(context, "tcp://127.0.0.1:0")
    peers = set()
    for _ in range(3):
        client = ControlClient.connect(context, server.endpoint)
        client.send(Ping("gateway", 1))
        peer, _ = await asyncio.wait_for(server.recv(), 30)
        peers.add(peer)
        client.close()

    assert len(peers) == 3
    server.close()


async def test_a_gone_gateway_does_not_end_the_server(context: zmq.asyncio.Context) -> None:
    server = ControlServer.bind(context, "tcp://127.0.0.1:0")
    client = ControlClient.connect(context, server.endpoint)
    client.send(Ping("gateway", 1))
    peer, _ = await asyncio.wait_for(server.recv(), 30)
    client.close()

    async with asyncio.timeout(30):
        while server.num_undeliverable == 0:
            await server.send(peer, StageReport("r:1", Stage.DECODING))
            await asyncio.sleep(0)
    second = ControlClient.connect(context, server.endpoint)
    second.send(Ping("gateway", 2))

    assert (await asyncio.wait_for(server.recv(), 30))[1] == Ping("gateway", 2)
    second.close()
    server.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b"garbage"],
        [encode(Ping("g", 1)), b"extra"],
        [msgpack.packb([9, "ping", {}])],
        [encode(StageReport("r:1", Stage.DECODING))],
    ],
)
async def test_a_malformed_message_is_counted_and_skipped(context: zmq.asyncio.Context, frames: list[bytes]) -> None:
    server = ControlServer.bind(context, "tcp://127.0.0.1:0")
    raw = context.socket(zmq.DEALER)
    raw.connect(server.endpoint)
    await raw.send_multipart(frames)
    await raw.send(encode(CancelTask("r:1", "test")))

    _, message = await asyncio.wait_for(server.recv(), 30)

    assert message == CancelTask("r:1", "test")
    assert server.num_malformed == 1
    raw.close(linger=0)
    server.close()


async def test_the_client_skips_what_a_node_cannot_say(context: zmq.asyncio.Context) -> None:
    raw = context.socket(zmq.ROUTER)
    port = raw.bind_to_random_port("tcp://127.0.0.1")
    client = ControlClient.connect(context, f"tcp://127.0.0.1:{port}")
    client.send(Ping("g", 1))
    identity, _ = await asyncio.wait_for(raw.recv_multipart(), 30)
    await raw.send_multipart([identity, encode(Ping("g", 1))])
    await raw.send_multipart([identity, b"\xc1"])
    await raw.send_multipart([identity, encode(StageReport("r:1", Stage.DECODING))])

    message = await asyncio.wait_for(client.recv(), 30)

    assert message == StageReport("r:1", Stage.DECODING)
    assert client.num_malformed == 2
    client.close()
    raw.close(linger=0)


async def test_a_closed_server_is_noticed_at_once(context: zmq.asyncio.Context) -> None:
    server = ControlServer.bind(context, "tcp://127.0.0.1:0")
    client = ControlClient.connect(context, server.endpoint, connect_timeout_s=30.0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.watch(), name="watch")
        client.send(Ping("gateway", 1))
        await asyncio.wait_for(server.recv(), 30)
        assert not client.lost.is_set()

        server.close()
        await asyncio.wait_for(client.lost.wait(), 30)

    with pytest.raises(ChannelLost):
        client.send(Ping("gateway", 2))
    client.close()


async def test_a_refused_connection_is_lost(context: zmq.asyncio.Context) -> None:
    server = ControlServer.bind(context, "tcp://127.0.0.1:0")
    server.close()
    client = ControlClient.connect(context, server.endpoint, connect_timeout_s=2)

    await asyncio.wait_for(client.watch(), 30)

    assert client.lost.is_set()
    client.close()


async def test_a_peer_that_accepts_but_stays_silent_is_lost_in_time(context: zmq.asyncio.Context) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = ControlClient.connect(context, f"tcp://127.0.0.1:{mute.getsockname()[1]}", connect_timeout_s=0.2)

        await asyncio.wait_for(client.watch(), 30)

        assert client.lost.is_set()
        client.close()


async def test_what_is_queued_for_a_dead_peer_does_not_hold_up_the_exit() -> None:
    """C171."""
    context = zmq.asyncio.Context()
    with socket.create_server(("127.0.0.1", 0)) as mute:  # the kernel connects, and that is all
        client = ControlClient.connect(context, f"tcp://127.0.0.1:{mute.getsockname()[1]}", connect_timeout_s=60)
        for sequence in range(100):
            client.send(Ping("gateway", sequence))

        client.close()

        await asyncio.wait_for(asyncio.to_thread(context.term), 20)  # without a limit it would wait for ever


async def test_a_cancel_sent_just_before_close_arrives(context: zmq.asyncio.Context) -> None:
    """C171."""
    server = ControlServer.bind(context, "tcp://127.0.0.1:0")
    client = ControlClient.connect(context, server.endpoint)
    client.send(Ping("gateway", 1))
    await asyncio.wait_for(server.recv(), 30)

    client.send(CancelTask("r:1", "bye"))
    client.close()

    assert (await asyncio.wait_for(server.recv(), 30))[1] == CancelTask("r:1", "bye")
    server.close()


def _chunk(attempt_id: str, start: int, **fields: object) -> TokenChunk:
    return TokenChunk(attempt_id, start, (7,), None, None, None)._replace(**fields)


async def _connected(server: ControlServer, context: zmq.asyncio.Context) -> tuple[ControlClient, Peer]:
    client = ControlClient.connect(context, server.endpoint)
    client.send(Ping("gateway", 1))
    peer, _ = await asyncio.wait_for(server.recv(), 30)
    return client, peer


async def _heard(client: ControlClient, count: int) -> list[object]:
    async with asyncio.timeout(30):
        return [await client.recv() for _ in range(count)]


async def test_what_one_turn_says_to_a_gateway_is_one_message(context: zmq.asyncio.Context) -> None:
    server = ControlServer.bind(context, "tcp://127.0.0.1:0")
    first, to_first = await _connected(server, context)
    second, to_second = await _connected(server, context)

    for start in range(3):
        server.say(to_first, _chunk("a:1", start))
        server.say(to_second, _chunk("b:1", start))
        server.say(to_first, _chunk("c:1", start))
    await asyncio.sleep(0)  # the turn ends
    server.say(to_first, _chunk("a:1", 3))

    steps = await _heard(first, 2)
    assert steps[0] == TokenBatch(tuple(_chunk(each, start) for start in range(3) for each in ("a:1", "c:1")))
    assert steps[1] == TokenBatch((_chunk("a:1", 3),))
    assert await _heard(second, 1) == [TokenBatch(tuple(_chunk("b:1", start) for start in range(3)))]
    for client in (first, second):
        client.close()
    server.close()


async def test_no_message_overtakes_the_tokens_said_before_it(context: zmq.asyncio.Context) -> None:
    server = ControlServer.bind(context, "tcp://127.0.0.1:0")
    client, peer = await _connected(server, context)
    scored = _chunk("b:1", 0, prompt_logprobs=(TokenLogprobs(-1.0, ()),))  # long ones are a message of their own

    server.say(peer, _chunk("a:1", 0))
    await server.send(peer, StageReport("a:1", Stage.DECODING))
    server.say(peer, _chunk("a:1", 1))
    server.say(peer, scored)
    server.say(peer, _chunk("a:1", 2, finish_reason=FinishReason.LENGTH))
    server.close()  # what is said is sent

    assert await _heard(client, 5) == [
        TokenBatch((_chunk("a:1", 0),)),
        StageReport("a:1", Stage.DECODING),
        TokenBatch((_chunk("a:1", 1),)),
        TokenBatch((scored,)),
        TokenBatch((_chunk("a:1", 2, finish_reason=FinishReason.LENGTH),)),
    ]
    client.close()


async def test_tokens_for_a_gone_gateway_are_counted_and_dropped(context: zmq.asyncio.Context) -> None:
    server = ControlServer.bind(context, "tcp://127.0.0.1:0")
    gone, to_gone = await _connected(server, context)
    stays, to_stays = await _connected(server, context)
    gone.close()

    async with asyncio.timeout(30):
        while server.num_undeliverable == 0:
            server.say(to_gone, _chunk("a:1", 0))
            await asyncio.sleep(0)
    server.say(to_stays, _chunk("b:1", 0))

    assert await _heard(stays, 1) == [TokenBatch((_chunk("b:1", 0),))]
    stays.close()
    server.close()
