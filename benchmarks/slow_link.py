"""What `--wire-compression auto` does over links of several rates: measured, not predicted.

    .venv/bin/python benchmarks/slow_link.py [MODEL_DIR] [--rates 5 10 50 0] [--dtypes bfloat16 int8] [--rounds 3]

The keys and values of a prompt of tests/data/alice.txt, computed by transformers and cut into blocks of 16 tokens, go
from a BlockSender to a BlockReceiver through a relay that lets so many MB/s pass (0: straight over loopback TCP). The
time of a hand-over that compresses as it decides by itself is compared with one that never does, in turn, in one run.
"""

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq.asyncio
from amounts import above_zero

from pdserve.engine.model_source import resolve_model
from pdserve.kvtransfer import BlockReceiver, BlockSender, KVLayout, PeerAddress, SenderConfig

TEXT = Path(__file__).parents[1] / "tests" / "data" / "alice.txt"
BLOCK_SIZE = 16
_CHUNK_BYTES = 16 * 1024
_TIMEOUT_S = 600.0


class Sink:
    """Takes every block and keeps none."""

    async def reserve(self, transfer_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> Sequence[int]:
        """Want everything."""
        return range(len(block_hashes))

    async def land(self, transfer_id: str, blocks: Sequence[tuple[int, memoryview]], start: int) -> None:
        """Look at nothing: the receiver has checked what arrived."""

    async def commit(self, transfer_id: str, metadata: bytes) -> None:
        """Hold nothing."""

    async def release(self, transfer_id: str, code: str, message: str) -> None:
        """Hold nothing."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What some hand-overs over one link came to."""

    seconds: tuple[float, ...]  # of each, offer to acknowledgement
    num_blocks: int
    num_compressed: int
    num_bytes: int  # as they travelled


@asynccontextmanager
async def paced(endpoint: str, bytes_per_s: float) -> AsyncIterator[str]:
    """Stand before an endpoint and let so many bytes a second through to it; yield the address of the stand."""
    host, port = endpoint.removeprefix("tcp://").split(":")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: float | None) -> None:
        clock = asyncio.get_running_loop().time
        free_at = clock()
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(_CHUNK_BYTES):
                if pace is not None:  # the link is busy with a chunk for so long, and idle time is not saved up
                    free_at = max(free_at, clock()) + len(chunk) / pace
                    await asyncio.sleep(max(0.0, free_at - clock()))
                writer.write(chunk)
                await writer.drain()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection(host, int(port), limit=_CHUNK_BYTES)
        there, back = copy(reader, onward_writer, bytes_per_s), copy(onward_reader, writer, None)
        ways = [asyncio.create_task(way) for way in (there, back)]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for each in (writer, onward_writer):
            each.transport.abort()
        await asyncio.gather(*ways, return_exceptions=True)
        ended.set()

    ended = asyncio.Event()
    async with await asyncio.start_server(meet, "127.0.0.1", 0, limit=_CHUNK_BYTES) as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.wait_for(ended.wait(), _TIMEOUT_S)


async def measure(
    layout: KVLayout, blocks: Sequence[bytes], bytes_per_s: float | None, compression: str, rounds: int
) -> Measured:
    """Hand the blocks over `rounds` times, on one connection; before it a first time, from which it learns the link."""
    config = SenderConfig(uses_shortcuts=False, shared_memory="never", compression=compression)
    with zmq.asyncio.Context() as context:
        async with contextlib.AsyncExitStack() as stack:
            receiver = await stack.enter_async_context(
                BlockReceiver.bind(context, node_id="d", incarnation="1", layout=layout, sink=Sink())
            )
            endpoint = receiver.endpoint
            if bytes_per_s is not None:
                endpoint = await stack.enter_async_context(paced(endpoint, bytes_per_s))
            sender = await stack.enter_async_context(
                BlockSender(context, node_id="p", incarnation="1", layout=layout, config=config)
            )
            peer = PeerAddress(endpoint, "d", "1")
            await _hand_over(sender, peer, layout, blocks, "first")
            before = sender.counts()
            seconds = [await _hand_over(sender, peer, layout, blocks, str(number)) for number in range(rounds)]
            after = sender.counts()
    return Measured(
        tuple(seconds),
        after.blocks_sent - before.blocks_sent,
        after.blocks_compressed - before.blocks_compressed,
        after.bytes_sent - before.bytes_sent,
    )


async def _hand_over(
    sender: BlockSender, peer: PeerAddress, layout: KVLayout, blocks: Sequence[bytes], name: str
) -> float:
    hashes = [number.to_bytes(32, "big") for number in range(len(blocks))]
    started_at = time.perf_counter()
    transfer = await sender.offer(peer, name, hashes, len(blocks) * layout.block_size, _TIMEOUT_S)
    await transfer.send_blocks(list(enumerate(blocks)))
    await transfer.finish(b"")
    return time.perf_counter() - started_at


def blocks_of(model_dir: Path, num_tokens: int, dtype: str) -> tuple[KVLayout, list[bytes]]:
    """Return the blocks of a prompt as a node that holds them in `dtype` has them."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    from pdserve.kvtransfer.rows import convert_rows

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    token_ids = AutoTokenizer.from_pretrained(model_dir).encode(TEXT.read_text())[:num_tokens]
    with torch.inference_mode():
        cache = model(torch.tensor([token_ids]), past_key_values=DynamicCache(), use_cache=True).past_key_values
    stacked = torch.stack([torch.cat((layer.keys, layer.values)) for layer in cache.layers])
    num_layers, _, num_heads, _, head_dim = stacked.shape
    rows = convert_rows(np.ascontiguousarray(stacked.numpy()).view(np.uint8), "float32", dtype)
    layout = KVLayout("m", num_layers, BLOCK_SIZE, num_heads, head_dim, dtype)
    starts = range(0, num_tokens - BLOCK_SIZE + 1, BLOCK_SIZE)
    return layout, [rows[:, :, :, start : start + BLOCK_SIZE].tobytes() for start in starts]


async def _main(arguments: argparse.Namespace) -> None:
    model_dir = resolve_model(arguments.model, progress=print)
    print("| link | dtype | blocks compressed | bytes that travel | time against `none` |\n|---|---|---|---|---|")
    for dtype in arguments.dtypes:
        layout, blocks = blocks_of(model_dir, arguments.tokens, dtype)
        for rate in arguments.rates:
            ways = {way: [] for way in ("auto", "none")}  # type: dict[str, list[Measured]]
            for _ in range(arguments.rounds):
                for way, found in ways.items():
                    found.append(await measure(layout, blocks, rate * 1e6 or None, way, 1))
            own, never = (statistics.median(each.seconds[0] for each in found) for found in ways.values())
            last = ways["auto"][-1]
            share = last.num_bytes / (last.num_blocks * layout.block_size_bytes)
            link = f"{rate:g} MB/s" if rate else "loopback"
            compressed = f"{last.num_compressed} of {last.num_blocks}"
            print(f"| {link} | {dtype} | {compressed} | {share:.1%} | {own / never:.2f} |", flush=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model directory; default: the demo model")
    parser.add_argument("--rates", type=float, nargs="+", default=[5, 10, 50, 0], help="MB/s; 0 is loopback")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32", "int8"])
    parser.add_argument("--tokens", type=above_zero(int), default=1024)
    parser.add_argument("--rounds", type=above_zero(int), default=3)
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
