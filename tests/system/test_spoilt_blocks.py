"""Blocks that are spoilt between real nodes: a relay in the TCP way of the KV plane changes what a prefill node says.

Whatever it does, the transfer fails typed and counted, nothing of it enters a cache or a sequence, the prompt is
computed again, and the client gets the tokens of an undisturbed run.
"""

import asyncio
import contextlib
import random
import struct
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve import LLM, SamplingParams
from pdserve.control.keyspace import Keyspace
from pdserve.control.messages import NodeInfo
from pdserve.control.node_registry import NodeRegistry
from pdserve.control.redis_connection import connect
from pdserve.kvtransfer.errors import INTEGRITY_CODES
from pdserve.kvtransfer.frames import Blocks, Done, Offer, decode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_FAR = "127.0.0.2"  # what the decode node tells others to dial: the relay is there
_MAX_TOKENS = 6
_PROMPT_TOKENS = 150  # several chunks, so several messages
_GREETING_BYTES = 64  # ZMTP 3
_MORE, _LONG, _COMMAND = 1, 2, 4

Parts = list[bytes]  # of one multipart message
Spoil = Callable[[Parts], Iterator[Parts | bytes]]  # messages to send instead; bytes go out as they are


class Relay:
    """Passes on what senders say, message by message. `spoil` sees the Blocks and the Done of some transfers; what it
    yields is sent instead. The ends use NULL, ZeroMQ's mechanism without keys: under CURVE nothing could be read."""

    def __init__(self) -> None:
        self.spoil: Spoil | None = None
        self.num_spoilt = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._targets: set[str] = set()

    def arm(self, spoil: Spoil | None) -> None:
        """Spoil from now on what is said of transfers of `_PROMPT_TOKENS` tokens; the canary's are shorter."""
        self.spoil, self.num_spoilt = spoil, 0

    async def serve(self, endpoints: dict[str, bool], stop: threading.Event) -> None:
        """Stand before these endpoints, told whether to read what is said to them, until `stop` is set."""
        async with contextlib.AsyncExitStack() as stack:
            for endpoint, is_read in endpoints.items():
                port = int(endpoint.rpartition(":")[2])
                await stack.enter_async_context(
                    await asyncio.start_server(partial(self._meet, port, is_read), _FAR, port)
                )
            await asyncio.to_thread(stop.wait)
            for writer in self._writers:
                writer.transport.abort()
            await self._idle.wait()

    async def _meet(self, port: int, is_read: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", port)
        writers = {writer, onward_writer}
        self._writers |= writers
        self._idle.clear()
        there = (self._pass_messages if is_read else _pass_bytes)(reader, onward_writer)
        ways = [asyncio.create_task(way) for way in (there, _pass_bytes(onward_reader, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for each in writers:
            each.transport.abort()
        await asyncio.gather(*ways, return_exceptions=True)
        self._writers -= writers
        if not self._writers:
            self._idle.set()

    async def _pass_messages(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_greeting = _GREETING_BYTES  # each end waits for the other within it
        while num_greeting:
            chunk = await reader.read(num_greeting)
            if not chunk:
                return
            num_greeting -= len(chunk)
            writer.write(chunk)
        parts: Parts = []
        while True:
            flags, body = await _read_frame(reader)
            if flags & _COMMAND:
                writer.write(_frame(flags, body))
            else:
                parts.append(body)
                if not flags & _MORE:
                    for message in self._instead_of(parts):
                        writer.write(message if isinstance(message, bytes) else _multipart(message))
                        await writer.drain()
                    parts = []

    def _instead_of(self, parts: Parts) -> Iterator[Parts | bytes]:
        message = decode(parts[0], len(parts) - 1)
        if isinstance(message, Offer) and message.num_tokens == _PROMPT_TOKENS:
            self._targets.add(message.transfer_id)
        is_target = isinstance(message, Blocks | Done) and message.transfer_id in self._targets
        if self.spoil is None or not is_target:
            yield parts
            return
        for instead in self.spoil(parts):
            if instead is not parts:
                self.num_spoilt += 1
            yield instead


async def _pass_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(2**16):
            writer.write(chunk)
            await writer.drain()


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    (flags,) = await reader.readexactly(1)
    size = struct.unpack(">Q" if flags & _LONG else "B", await reader.readexactly(8 if flags & _LONG else 1))[0]
    return flags, await reader.readexactly(size)


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) > 255:
        return bytes([flags | _LONG]) + struct.pack(">Q", len(body)) + body
    return bytes([flags & ~_LONG, len(body)]) + body


def _multipart(parts: Parts) -> bytes:
    last = len(parts) - 1
    return b"".join(_frame(_MORE if index < last else 0, body) for index, body in enumerate(parts))


# Each of these is made anew for each test: what it remembers is of one transfer, or of two.


def flip(position: float) -> Spoil:
    def spoil(parts: Parts) -> Iterator[Parts]:
        if len(parts) > 1:
            body = bytearray(parts[-1])
            body[round(position * (len(body) - 1))] ^= 0x10
            yield [*parts[:-1], bytes(body)]
        else:
            yield parts

    return spoil


def truncate(parts: Parts) -> Iterator[Parts]:
    yield [*parts[:-1], parts[-1][:-4]] if len(parts) > 1 else parts


def lose_a_frame(parts: Parts) -> Iterator[Parts]:
    yield parts[:-1] if len(parts) > 1 else parts


def lose_the_blocks(parts: Parts) -> Iterator[Parts]:
    if len(parts) == 1:
        yield list(parts)  # the Done of what never came


def duplicate(parts: Parts) -> Iterator[Parts]:
    yield parts
    if len(parts) > 1:
        yield list(parts)


def reorder() -> Spoil:
    held: list[Parts] = []

    def spoil(parts: Parts) -> Iterator[Parts]:
        if len(parts) > 1 and not held:
            held.append(parts)
            return
        yield list(parts)
        if held and held[0]:
            yield held[0]
            held[0] = []

    return spoil


def interleave() -> Spoil:
    """Exchange the payloads of the first messages of two transfers that are under way at once."""
    held: dict[str, list[Parts]] = {}

    def spoil(parts: Parts) -> Iterator[Parts]:
        message = decode(parts[0], len(parts) - 1)
        assert isinstance(message, Blocks | Done)
        if len(held) == 2:
            yield parts
            return
        held.setdefault(message.transfer_id, []).append(parts)
        if len(held) == 2:
            (one, *rest), (other, *_) = held.values()
            yield from ([one[0], *other[1:]], [other[0], *one[1:]], *rest)

    return spoil


def replay() -> Spoil:
    """Say again, in a later transfer, the blocks of an earlier one that was taken over."""
    earlier: list[tuple[str, Parts]] = []

    def spoil(parts: Parts) -> Iterator[Parts]:
        message = decode(parts[0], len(parts) - 1)
        assert isinstance(message, Blocks | Done)
        if len(parts) > 1 and not earlier:
            earlier.append((message.transfer_id, parts))
        elif len(parts) > 1 and earlier[0][0] != message.transfer_id:
            yield list(earlier[0][1])
        yield parts

    return spoil


def cut_the_line(parts: Parts) -> Iterator[bytes | Parts]:
    if len(parts) > 1:
        yield _multipart(parts)[: -len(parts[-1]) // 2]
        raise ConnectionResetError


def garble_the_framing(parts: Parts) -> Iterator[bytes | Parts]:
    yield bytes([0xF8]) + _multipart(parts)[1:] if len(parts) > 1 else parts


def flip_in_the_header(parts: Parts) -> Iterator[Parts]:
    yield [b"\xc1" + parts[0][1:], *parts[1:]]


@pytest.fixture(scope="module")
def model_dir(tiny_model: Any) -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def alone(model_dir: Any) -> Callable[[list[int]], list[int]]:
    """Return what gives the tokens of a run without any transfer."""
    llm = LLM(model_dir, num_blocks=100)
    sampling = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True)
    return lambda prompt: list(llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.fixture(scope="module")
def cluster(running_cluster: Any, model_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A gateway, a prefill node that keeps to TCP, and a decode node that tells others to dial `_FAR`."""
    folder = tmp_path_factory.mktemp("spoilt")
    with running_cluster(folder, model_dir, 0, 0, ("--num-blocks", "400")) as cluster:
        cluster.start_node("decode", 0, "--advertise-host", _FAR)
        cluster.start_node("prefill", 0, "--local-transport", "tcp", "--max-num-batched-tokens", "32")
        yield cluster


@pytest.fixture(scope="module")
def relay(cluster: Any) -> Iterator[Relay]:
    """Stand between the decode node and everybody else, in a loop of its own."""
    relay = Relay()
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(relay, cluster, stop)), name="relay")
    thread.start()
    try:
        cluster.wait_until(lambda: _both_ready(cluster), "both nodes are ready")
        yield relay
    finally:
        stop.set()
        thread.join(30)


async def _serve(relay: Relay, cluster: Any, stop: threading.Event) -> None:
    info = await _decode_node(cluster)
    await relay.serve({info.control_endpoint: False, str(info.transfer_endpoint): True}, stop)


async def _decode_node(cluster: Any) -> NodeInfo:
    redis = connect(cluster.redis.url, timeout_s=30.0)
    try:
        registry = NodeRegistry(redis, Keyspace("default"))
        for _ in range(3_600):
            for node in await registry.list():
                if node.info.node_id == "decode-0":
                    return node.info
            await asyncio.sleep(0.05)  # a registration is not announced
    finally:
        await redis.close()
    raise AssertionError(cluster.log("decode-0"))


def _both_ready(cluster: Any) -> bool:
    return {"decode-0", "prefill-0"} <= {node["node_id"] for node in cluster.status()["nodes"] if node["ready"]}


async def _ask(cluster: Any, prompt: list[int]) -> list[int]:
    body = {"model": "test", "prompt": prompt, "max_tokens": _MAX_TOKENS, "temperature": 0}
    async with aiohttp.ClientSession() as session:
        options = {"return_token_ids": True, "ignore_eos": True}
        async with session.post(f"{cluster.url}/v1/completions", json=body | options) as reply:
            assert reply.status == 200, await reply.text()
            token_ids: list[int] = (await reply.json())["choices"][0]["token_ids"]
            return token_ids


def _prompts(kind: str, number: int) -> list[list[int]]:
    """Prompts that no other test has: nothing of them is cached anywhere."""
    seeds = random.Random(kind)
    return [[seeds.randrange(5, 199) for _ in range(_PROMPT_TOKENS)] for _ in range(number)]


def _failures(cluster: Any) -> Counter[str]:
    """Return what failed at both ends, by cause, with all peers and strangers."""
    counts: Counter[str] = Counter()
    for node in cluster.status()["nodes"]:
        for peer in node["transfer"]["peers"]:
            counts.update(peer["failures"])
    return counts


def _metric(cluster: Any, name: str, **labels: str) -> float:
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=60) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    samples = (sample for family in families for sample in family.samples if sample.name == name)
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


# How, how many prompts at once, the causes of which one is counted. None follows itself: what a node counts late
# is not taken for the next test's.
SPOILS: dict[str, tuple[Callable[[], Spoil], int, set[str]]] = {
    "a byte in the middle is flipped": (lambda: flip(0.5), 1, {"wrong_checksum"}),
    "the end of a block is cut off": (lambda: truncate, 1, {"wrong_size"}),
    "the last byte is flipped": (lambda: flip(1.0), 1, {"wrong_checksum"}),
    "every message comes twice": (lambda: duplicate, 1, {"wrong_sequence"}),
    "all blocks are lost": (lambda: lose_the_blocks, 1, {"incomplete"}),
    "messages change places": (reorder, 1, {"wrong_sequence"}),
    "two transfers are mixed up": (interleave, 2, {"wrong_checksum"}),
    "the line is cut in a frame": (lambda: cut_the_line, 1, {"peer_lost"}),
    "a frame is lost": (lambda: lose_a_frame, 1, {"protocol"}),
    "the framing is garbled": (lambda: garble_the_framing, 1, {"peer_lost", "protocol"}),
    "a byte of the header is flipped": (lambda: flip_in_the_header, 1, {"protocol"}),
}


@pytest.mark.parametrize("kind", SPOILS)
async def test_a_spoilt_transfer_fails_typed_and_the_answer_is_right(
    cluster: Any, relay: Relay, alone: Callable[[list[int]], list[int]], kind: str
) -> None:
    make, num_prompts, causes = SPOILS[kind]
    prompts = _prompts(kind, num_prompts)
    before, retries = _failures(cluster), _metric(cluster, "pdserve_retries_total", cause="transfer_failed")
    relay.arm(make())
    try:
        answers = await asyncio.gather(*(_ask(cluster, prompt) for prompt in prompts))
        num_spoilt = relay.num_spoilt
    finally:
        relay.arm(None)

    assert num_spoilt > 0
    expected = [alone(prompt) for prompt in prompts]
    assert answers == expected
    cluster.wait_until(lambda: causes & (_failures(cluster) - before).keys(), "the nodes have counted why")
    assert _metric(cluster, "pdserve_retries_total", cause="transfer_failed") >= retries + num_prompts
    cause = min(causes & (_failures(cluster) - before).keys())
    assert _metric(cluster, "pdserve_transfer_failures_total", cause=cause) > 0
    cluster.wait_idle()
    # What the decode node now holds of these prompts it has computed itself, and it is right.
    assert [await _ask(cluster, prompt) for prompt in prompts] == expected


async def test_blocks_of_an_earlier_transfer_said_again_change_nothing(
    cluster: Any, relay: Relay, alone: Callable[[list[int]], list[int]]
) -> None:
    """They belong to a generation that has ended: the receiver drops them, and the transfer under way is not theirs.
    Whatever other tests have done to the connection, hand-overs go on."""
    prompts = _prompts("replay", 3)
    before, handed_over = _failures(cluster), cluster.status()["routes"]["disaggregated"]
    relay.arm(replay())
    try:
        answers = [await _ask(cluster, prompt) for prompt in prompts]
        num_replayed = relay.num_spoilt
    finally:
        relay.arm(None)

    assert num_replayed > 0
    assert cluster.status()["routes"]["disaggregated"] == handed_over + len(prompts)
    assert answers == [alone(prompt) for prompt in prompts]
    cluster.wait_idle()
    # What other tests did to the connection may be reported only now; these would be of the blocks said again.
    assert not (_failures(cluster) - before).keys() & {str(code) for code in INTEGRITY_CODES}
    assert await _ask(cluster, prompts[0]) == answers[0]
