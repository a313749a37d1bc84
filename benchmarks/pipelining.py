"""How long a decode node waits after the end of a prefill, on a link as slow as the prefill itself.

    .venv/bin/python benchmarks/pipelining.py [--tokens 512 2048] [--model DIR] [--json FILE]

A relay between sender and receiver passes bytes on so slowly that the whole transfer takes as long as the prefill.
Three ways to send the same blocks: all when the prefill has ended, each chunk when it is computed, and each group of
layers when it is computed. Printed is the time from the end of the prefill to the commit at the receiver, and that as a
part of the time that all the bytes take on the link. Without --model the prefill is a clock with the demo model's
shape; with it an engine computes, and as no two of its prefills take the same time, the link is set by the one before;
a round whose prefill took over 10 % more or less than the link is made again with the link set anew, up to six times,
and `off` is by how much the round that counts was off.
"""

import argparse
import asyncio
import json
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import zmq.asyncio
from amounts import above_zero
from outputs import output_file

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.layer_progress import LayerProgress, layer_group_ends
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.kvtransfer import BlockReceiver, BlockSender, KVLayout, PeerAddress, SenderConfig, hash_blocks

WAYS = ("at the end", "chunks", "layers")
DEMO = KVLayout("demo", 30, 16, 3, 64, "float32")
CHUNK_TOKENS = 512
PIECE_BYTES = 64 * 1024
DEADLINE_S = 600.0
MAX_LATENESS_S = 0.1
MAX_UNEVENNESS = 0.1  # between prefill and link
MAX_ATTEMPTS = 6


@dataclass(frozen=True, slots=True)
class Ready:
    """Blocks [first, end) have `num_layers` final layers, and lie in `blocks`; `is_end`: the prompt is computed."""

    first: int
    end: int
    num_layers: int
    blocks: Sequence[memoryview]
    is_end: bool = False


class Sink:
    """Takes everything and keeps nothing."""

    async def reserve(self, transfer_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> Sequence[int]:
        return range(len(block_hashes))

    async def land(self, transfer_id: str, blocks: Sequence[tuple[int, memoryview]], start: int) -> None:
        return None

    async def commit(self, transfer_id: str, metadata: bytes) -> None:
        return None

    async def release(self, transfer_id: str, code: str, message: str) -> None:
        return None


class Relay:
    """Passes bytes on, towards the receiver not faster than `bytes_per_s`."""

    def __init__(self, endpoint: str) -> None:
        self.bytes_per_s = float("inf")
        self._serving: set[asyncio.Task[None]] = set()
        self._host, _, self._port = endpoint.removeprefix("tcp://").rpartition(":")

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=PIECE_BYTES)
        async with server:
            yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _serve(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.create_task(self._connect(near, near_out), name="relay"))

    async def _connect(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        far, far_out = await asyncio.open_connection(self._host, int(self._port), limit=PIECE_BYTES)
        await asyncio.gather(self._pass_on(near, far_out, True), self._pass_on(far, near_out, False))

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, is_paced: bool) -> None:
        loop, free_at = asyncio.get_running_loop(), 0.0
        while piece := await source.read(PIECE_BYTES):
            if is_paced:
                # What the relay itself was late is caught up, within bounds; what the sender was late is not.
                free_at = max(free_at, loop.time() - MAX_LATENESS_S) + len(piece) / self.bytes_per_s
                await asyncio.sleep(free_at - loop.time())
            target.write(piece)
            await target.drain()
        target.close()


class Clock:
    """A prefill that takes its time and computes nothing."""

    layout = DEMO

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s

    async def run(self, num_tokens: int) -> AsyncIterator[Ready]:
        block = memoryview(secrets.token_bytes(DEMO.block_size_bytes))
        now = asyncio.get_running_loop().time
        next_at = now()
        for start in range(0, num_tokens, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, num_tokens)
            first, last = start // DEMO.block_size, DEMO.num_blocks(end)
            blocks = [block] * (last - first)
            for num_layers in sorted(layer_group_ends(DEMO.num_layers)):
                part = num_layers / DEMO.num_layers
                await asyncio.sleep(next_at + part * (end - start) / self._tokens_per_s - now())
                yield Ready(first, last, num_layers, blocks)
            next_at += (end - start) / self._tokens_per_s
            yield Ready(first, last, DEMO.num_layers, blocks, is_end=end == num_tokens)


class Computed:
    """A prefill by an engine."""

    def __init__(self, engine: EngineThread, layout: KVLayout) -> None:
        self._engine = engine
        self.layout = layout

    async def run(self, num_tokens: int) -> AsyncIterator[Ready]:
        entries: asyncio.Queue[Ready] = asyncio.Queue()

        def on_layers(progress: LayerProgress) -> None:
            table = progress.block_table[progress.first_block : progress.end_block]
            blocks = [self._engine.block_bytes(block_id) for block_id in table]
            entries.put_nowait(Ready(progress.first_block, progress.end_block, progress.num_layers, blocks))

        sampling = SamplingParams(max_tokens=2, temperature=0.0, seed=0, ignore_eos=True)
        prompt = tuple(1 + secrets.randbelow(1_000) for _ in range(num_tokens))
        spec = SequenceSpec("prompt", prompt, sampling, is_export=True)
        first = 0
        async with self._engine.computing(spec, on_layers=on_layers) as (stream,):
            following = asyncio.create_task(stream.next())
            while True:
                waiting = asyncio.create_task(entries.get())
                await asyncio.wait({waiting, following}, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    yield waiting.result()
                    continue
                waiting.cancel()
                output = following.result()
                is_end = output.token is not None
                end = self.layout.num_blocks(output.num_computed_tokens)
                table = output.exported_blocks[first:end]
                blocks = [self._engine.block_bytes(block_id) for block_id in table]
                yield Ready(first, end, self.layout.num_layers, blocks, is_end)
                if is_end:
                    return
                first, following = end, asyncio.create_task(stream.next())


async def measure(
    prefill: Clock | Computed, sender: BlockSender, peer: PeerAddress, num_tokens: int, way: str
) -> tuple[float, float]:
    """Return the seconds of the prefill, and from its end to the commit."""
    layout, transfer_id = prefill.layout, secrets.token_hex(8)
    hashes = hash_blocks([secrets.randbelow(1_000) for _ in range(num_tokens)], layout.block_size, "", "benchmark")
    held: list[Ready] = []
    started_at = ended_at = time.monotonic()
    async with await sender.offer(peer, transfer_id, hashes, num_tokens, DEADLINE_S) as transfer:
        await transfer.granted()
        entries: asyncio.Queue[Ready] = asyncio.Queue()

        async def ship() -> None:
            while True:
                ready = await entries.get()
                blocks = list(enumerate(ready.blocks, ready.first))
                if ready.num_layers < layout.num_layers:
                    if way == "layers" and entries.empty():
                        await transfer.send_layers(blocks, ready.num_layers)
                    continue
                held.append(ready)
                if (way != "at the end" or ready.is_end) and (way == "layers" or entries.empty()):
                    for each in held:
                        await transfer.send_blocks(_unsent(each, done))
                    held.clear()
                if ready.is_end:
                    await transfer.finish(b"")
                    return

        done: set[int] = set()
        shipping = asyncio.create_task(ship())
        async with aclosing(prefill.run(num_tokens)) as steps:
            started_at = time.monotonic()
            async for ready in steps:
                if ready.is_end:
                    ended_at = time.monotonic()
                entries.put_nowait(ready)
                if ready.is_end:
                    await shipping  # its blocks are the prefill's until then
        return ended_at - started_at, time.monotonic() - ended_at


def _unsent(ready: Ready, done: set[int]) -> list[tuple[int, memoryview]]:
    """Return each block the first time that it is whole: the last group of layers and the chunk both say so."""
    new = [(index, block) for index, block in enumerate(ready.blocks, ready.first) if index not in done]
    done.update(index for index, _ in new)
    return new


@dataclass(frozen=True, slots=True)
class Round:
    """One prefill and its transfer over a link that takes `link_s` for all the bytes."""

    way: str
    num_tokens: int
    link_s: float
    prefill_s: float
    then_s: float

    @property
    def unevenness(self) -> float:
        """By which part of the link's time the prefill took longer or shorter."""
        return abs(self.prefill_s / self.link_s - 1)


async def compare(
    prefill: Clock | Computed, lengths: Sequence[int], num_rounds: int, rows: list[dict[str, object]]
) -> None:
    """Print a table, and add its rows to `rows`."""
    layout = prefill.layout
    print(
        f"{'tokens':>7} {'chunks':>6} {'way':12} {'link s':>7} {'prefill s':>9} {'then s':>7} {'of link':>7} {'off':>5}"
    )
    with zmq.asyncio.Context() as context:
        async with (
            BlockReceiver.bind(context, node_id="d", incarnation="1", layout=layout, sink=Sink()) as receiver,
            BlockSender(
                context,
                node_id="p",
                incarnation="1",
                layout=layout,
                config=SenderConfig(uses_shortcuts=False, shared_memory="never", compression="none"),
            ) as sender,
        ):
            relay = Relay(receiver.endpoint)
            async with relay.listen() as endpoint:
                link = Link(relay, sender, PeerAddress(endpoint, "d", "1"))
                for num_tokens in lengths:
                    rounds: dict[str, list[Round]] = {way: [] for way in WAYS}
                    await link.adapt(prefill, num_tokens)
                    for _ in range(num_rounds):
                        for way in WAYS:
                            rounds[way].append(await link.even_round(prefill, num_tokens, way))
                    rows += [_row(measured) for measured in rounds.values()]


class Link:
    """The way through the relay, as slow as the prefill before."""

    def __init__(self, relay: Relay, sender: BlockSender, peer: PeerAddress) -> None:
        self._relay = relay
        self._sender = sender
        self._peer = peer
        self._seconds = 0.0

    async def adapt(self, prefill: Clock | Computed, num_tokens: int) -> None:
        """Set the link by a prefill whose blocks travel unhindered."""
        self._relay.bytes_per_s = float("inf")
        self._seconds, _ = await measure(prefill, self._sender, self._peer, num_tokens, "at the end")

    async def even_round(self, prefill: Clock | Computed, num_tokens: int, way: str) -> Round:
        """Measure until prefill and link take about as long; return the most even round."""
        num_bytes = prefill.layout.num_blocks(num_tokens) * prefill.layout.block_size_bytes
        best: Round | None = None
        for _ in range(MAX_ATTEMPTS):
            self._relay.bytes_per_s = num_bytes / self._seconds
            took = await measure(prefill, self._sender, self._peer, num_tokens, way)
            latest = Round(way, num_tokens, self._seconds, *took)
            if best is None or latest.unevenness < best.unevenness:
                best = latest
            if latest.unevenness <= MAX_UNEVENNESS:
                break
            self._seconds = latest.prefill_s
        assert best is not None
        return best


def _row(rounds: Sequence[Round]) -> dict[str, object]:
    """Print and return the round of the median."""
    middle = sorted(rounds, key=lambda each: each.then_s / each.link_s)[len(rounds) // 2]
    part = statistics.median(each.then_s / each.link_s for each in rounds)
    chunks = -(-middle.num_tokens // CHUNK_TOKENS)
    print(f"{middle.num_tokens:7} {chunks:6} {middle.way:12} {middle.link_s:7.2f} {middle.prefill_s:9.2f} "
          f"{middle.then_s:7.2f} {part:7.2f} {middle.unevenness:5.2f}", flush=True)  # fmt: skip
    return {**asdict(middle), "of_link": round(part, 3), "unevenness": round(middle.unevenness, 3)}


async def _measure(arguments: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    if arguments.model is None:
        await compare(Clock(arguments.tokens_per_s), arguments.tokens, arguments.rounds, rows)
        return
    config = EngineConfig(model_dir=arguments.model, block_size=16, num_blocks=400, max_num_batched_tokens=CHUNK_TOKENS)
    async with EngineThread.start(await asyncio.to_thread(Engine.load, config)) as engine:
        facts = engine.facts
        layout = KVLayout("m", facts.num_layers, facts.block_size, facts.num_kv_heads, facts.head_dim, facts.kv_dtype)
        await compare(Computed(engine, layout), arguments.tokens, arguments.rounds, rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=above_zero(int), nargs="+", default=[512, 2048], help="lengths of prompts")
    parser.add_argument("--tokens-per-s", type=above_zero(float), default=256.0, help="of the clock")
    parser.add_argument("--rounds", type=above_zero(int), default=3)
    parser.add_argument("--json", type=output_file, help="write the table there")
    parser.add_argument("--model", type=Path, help="folder of a model that computes the prompts")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    try:
        asyncio.run(_measure(arguments, rows))
    finally:  # also of what was ended by Ctrl-C
        if rows and arguments.json is not None:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
