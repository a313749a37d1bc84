"""What a node's event loop pays to send the tokens of a step: one message a step, against one message a token.

    .venv/bin/python benchmarks/step_messages.py [--steps 400]

Real outputs of the engine's kind go the node's own way, from `SequenceStream` to a real socket whose other end reads.
Prints, for several numbers of streams, the CPU microseconds of the sending thread in each step: medians, the two ways
by turns. A message a token also wakes a task a token, as a node did before control protocol 8.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable

import zmq.asyncio
from amounts import above_zero

from pdserve.control.channel import ControlClient, ControlServer, Peer
from pdserve.control.messages import Ping, TokenBatch
from pdserve.control.node_reports import token_chunk
from pdserve.engine.engine_thread import SequenceStream
from pdserve.engine.step_output import SampledToken, StepOutput

_STREAMS = (1, 4, 16, 64)
_ROUND_STEPS = 20
_TOKEN_ID = 1820

Follow = Callable[[SequenceStream, ControlServer, Peer], asyncio.Task[None]]


def _a_step(stream: SequenceStream, server: ControlServer, peer: Peer) -> asyncio.Task[None]:
    def take(output: StepOutput) -> bool:
        server.say(peer, token_chunk(output))
        return False

    return asyncio.create_task(stream.follow(take), name=stream.seq_id)


def _a_token(stream: SequenceStream, server: ControlServer, peer: Peer) -> asyncio.Task[None]:
    async def follow() -> None:
        while True:
            await server.send(peer, TokenBatch((token_chunk(await stream.next()),)))

    return asyncio.create_task(follow(), name=stream.seq_id)


async def _round(server: ControlServer, client: ControlClient, peer: Peer, follow: Follow, streams: int) -> list[float]:
    """Return the microseconds of each step."""
    open_streams = [SequenceStream(f"{number:032x}:1") for number in range(streams)]
    tasks = [follow(stream, server, peer) for stream in open_streams]
    await asyncio.sleep(0)
    microseconds = []
    for position in range(_ROUND_STEPS):
        outputs = [
            StepOutput(each.seq_id, position, SampledToken(_TOKEN_ID), None, position, 0) for each in open_streams
        ]
        begun_s = time.thread_time()
        for stream, output in zip(open_streams, outputs, strict=True):
            stream.put(output)
        for _ in range(3):  # until all tasks have had their turn
            await asyncio.sleep(0)
        microseconds.append(1e6 * (time.thread_time() - begun_s))
        num_heard = 0
        while num_heard < streams:
            heard = await client.recv()
            assert isinstance(heard, TokenBatch)
            num_heard += len(heard.chunks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return microseconds


async def _measure(steps: int) -> dict[str, dict[str, float]]:
    context = zmq.asyncio.Context()
    server = ControlServer.bind(context, "tcp://127.0.0.1:0")
    client = ControlClient.connect(context, server.endpoint)
    ways: dict[str, Follow] = {"a message a step": _a_step, "a message a token": _a_token}
    try:
        client.send(Ping("bench", 0))
        peer, _ = await server.recv()
        result = {}
        for streams in _STREAMS:
            measured: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(max(1, steps // _ROUND_STEPS)):
                for name, follow in ways.items():
                    measured[name] += await _round(server, client, peer, follow, streams)
            result[str(streams)] = {name: round(statistics.median(each), 1) for name, each in measured.items()}
        return result
    finally:
        client.close()
        server.close()
        context.destroy(linger=0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=above_zero(int), default=400)
    steps = parser.parse_args().steps
    print(json.dumps({"cpu_us_per_step_by_streams": asyncio.run(_measure(steps))}))


if __name__ == "__main__":
    main()
