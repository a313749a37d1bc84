"""What the key of an installation costs on the control plane: CPU time for each message of tokens, with and without.

    .venv/bin/python benchmarks/control_keys.py [--messages 20000] [--chunks 16] [--rounds 5]

A node's end and a gateway's end in one process over loopback TCP; messages of so many chunks of one token, as a step of
a decode node with so many streams sends them. Both ways take turns in one run; CPU time is that of the whole process,
libzmq's threads included.
"""

import argparse
import asyncio
import statistics
import time

import zmq.asyncio
from amounts import above_zero

from pdserve.control.channel import ControlClient, ControlServer, CurveKeys
from pdserve.control.messages import Ping, TokenBatch, TokenChunk
from pdserve.kvtransfer.curve_keys import generate_keys

_UNDER_WAY = 256  # messages that wait to be read: far fewer than either end may queue


async def measure(keys: CurveKeys | None, num_messages: int, num_chunks: int) -> float:
    """Return the CPU seconds of one message."""
    batch = TokenBatch(
        tuple(TokenChunk(f"cmpl-{number:032x}-0:1", 100, (number,), None, None, None) for number in range(num_chunks))
    )
    with zmq.asyncio.Context() as context:
        async with ControlServer.listening(context, "tcp://127.0.0.1:0", keys) as server:
            client = ControlClient.connect(context, server.endpoint, 10.0, keys)
            client.send(Ping("gateway", 0))
            peer, _ = await server.recv()
            started_at = time.process_time()
            for sent in range(0, num_messages, _UNDER_WAY):
                now = min(_UNDER_WAY, num_messages - sent)
                for _ in range(now):
                    await server.send(peer, batch)
                for _ in range(now):
                    await client.recv()
            seconds = time.process_time() - started_at
            client.close()
    return seconds / num_messages


async def _main(num_messages: int, num_chunks: int, rounds: int) -> None:
    ways: dict[str, CurveKeys | None] = {"in the clear": None, "under a key": generate_keys()}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, keys in ways.items():
            found[way].append(await measure(keys, num_messages, num_chunks))
    print("| control plane | CPU a message | CPU a token |\n|---|---|---|")
    for way, seconds in found.items():
        each = statistics.median(seconds) * 1e6
        print(f"| {way} | {each:.1f} µs | {each / num_chunks:.2f} µs |")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=above_zero(int), default=20_000)
    parser.add_argument("--chunks", type=above_zero(int), default=16)
    parser.add_argument("--rounds", type=above_zero(int), default=5)
    arguments = parser.parse_args()
    asyncio.run(_main(arguments.messages, arguments.chunks, arguments.rounds))


if __name__ == "__main__":
    main()
