"""What a node's prefix cache holds, told to whoever indexes it, in the format of vLLM's KV events.

A PUB socket sends `[topic, sequence, payload]`: the sequence is 8 bytes, big-endian, from 0; the payload is the msgpack
of `[timestamp, events, data_parallel_rank]`. Subscribers that missed something ask the replay ROUTER, from a REQ or
DEALER, with `["", first sequence]` and get `["", sequence, payload]` for each batch that is still kept, then the
sequence -1 with an empty payload. What differs between the versions of vLLM is a `KVEventFormat`.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from enum import StrEnum

import msgpack  # type: ignore[import-untyped]  # ships no types
import zmq
import zmq.asyncio

from pdserve.kvtransfer.curve_keys import CurveKeys
from pdserve.kvtransfer.sockets import check_endpoint, guard, guarded_context, send_now
from pdserve.kvtransfer.task_set import TaskSet

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_CLOSE_TIMEOUT_S = 0.5
_MAX_REQUEST_BYTES = 1_024
_LOOPBACK = "tcp://127.0.0.1:0"
_REPLAYED_PER_TURN = 64  # then others have theirs: a whole replay at once would hold the event loop up for a second


class KVEventFormat(StrEnum):
    """How an event is written."""

    ARRAY = "array"  # its name, then its fields in order: vLLM up to 0.23, and routers that read every version
    MAP = "map"  # fields by name, the event's own under "type", and the topic in replays too: vLLM from 0.26 on


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Full blocks, one after another, came into the cache; `parent_block_hash` is the block before the first."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]  # of all the blocks
    block_size: int
    lora_id: int | None = None
    medium: str | None = None  # None: the device
    lora_name: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks left the cache."""

    block_hashes: tuple[bytes, ...]
    medium: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache is empty: at the start of a node, and when it drops everything."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventConfig:
    """How events are published. Token ids are what users wrote: beyond loopback they need keys or `allow_plaintext`."""

    endpoint: str = _LOOPBACK
    replay_endpoint: str = _LOOPBACK
    topic: str = ""
    format: KVEventFormat = KVEventFormat.ARRAY
    data_parallel_rank: int | None = None
    max_kept_batches: int = 10_000
    max_queued_batches: int = 10_000  # for a subscriber that does not read; it loses what is beyond
    curve: CurveKeys | None = None
    allow_plaintext: bool = False

    def __post_init__(self) -> None:
        for name in ("max_kept_batches", "max_queued_batches"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for endpoint in (self.endpoint, self.replay_endpoint):
            check_endpoint(endpoint, self.curve, self.allow_plaintext)


class KVEventPublisher:
    """Owns the two sockets and the batches kept for replay, the last `max_kept_batches`."""

    def __init__(self, config: KVEventConfig, clock: Callable[[], float] = time.time) -> None:
        self.endpoint = ""
        self.replay_endpoint = ""
        self._config = config
        self._clock = clock
        self._topic = config.topic.encode()
        self._next_sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.max_kept_batches)
        self._publisher: zmq.asyncio.Socket | None = None
        self._tasks = TaskSet()

    @classmethod
    @asynccontextmanager
    async def bind(
        cls, context: zmq.asyncio.Context, config: KVEventConfig, clock: Callable[[], float] = time.time
    ) -> AsyncIterator["KVEventPublisher"]:
        """Publish and answer until the block is left; with keys in a context of its own."""
        events = cls(config, clock)
        async with AsyncExitStack() as stack:
            if config.curve is not None:
                context = await stack.enter_async_context(guarded_context(config.curve, _ignore))
            publisher, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
            # A whole replay and the word that ends it fit into the queue of who asks; who is full or gone is an error.
            replay.setsockopt(zmq.SNDHWM, config.max_kept_batches + 1)
            replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
            publisher.setsockopt(zmq.SNDHWM, config.max_queued_batches)
            for socket, endpoint in ((publisher, config.endpoint), (replay, config.replay_endpoint)):
                stack.callback(socket.close, linger=0)
                socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
                socket.setsockopt(zmq.IPV6, int("[" in endpoint))
                if config.curve is not None:
                    guard(socket, config.curve)
                socket.bind(endpoint)
            stack.push_async_callback(events._tasks.close, _CLOSE_TIMEOUT_S)
            events._start(publisher, replay)
            yield events

    async def watch(self) -> None:
        """Wait until the publisher is closed.

        Raises:
            RuntimeError: its replay task has failed.
        """
        await self._tasks.watch()

    def publish(self, events: Sequence[KVEvent]) -> int:
        """Send one batch to all subscribers, without waiting for any; return its sequence number."""
        assert self._publisher is not None
        sequence = self._next_sequence
        self._next_sequence += 1
        written = [_to_wire(event, self._config.format) for event in events]
        batch = [self._clock(), written, self._config.data_parallel_rank]
        payload: bytes = msgpack.packb(batch)
        self._kept.append((sequence, payload))
        send_now(self._publisher, [self._topic, sequence.to_bytes(8, "big"), payload])
        return sequence

    def _start(self, publisher: zmq.asyncio.Socket, replay: zmq.asyncio.Socket) -> None:
        self._publisher = publisher
        self.endpoint = publisher.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self._tasks.spawn(self._replay(replay), name="kv-event-replay")

    async def _replay(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            identity, *request = await socket.recv_multipart()
            if len(request) != 2 or request[0] != b"" or len(request[1]) != 8:
                logger.warning("a replay request is an empty frame and 8 bytes of sequence")
                continue
            try:
                await self._answer(socket, identity, int.from_bytes(request[1], "big"))
            except zmq.ZMQError as error:
                logger.warning("a replay was cut short: %s", error)

    async def _answer(self, socket: zmq.asyncio.Socket, identity: bytes, first: int) -> None:
        is_map = self._config.format is KVEventFormat.MAP
        head, last = ([identity, b"", self._topic], [identity, b"", b""]) if is_map else ([identity, b""],) * 2
        batches = [(sequence, payload) for sequence, payload in self._kept if sequence >= first]
        for start in range(0, len(batches), _REPLAYED_PER_TURN):
            for sequence, payload in batches[start : start + _REPLAYED_PER_TURN]:
                send_now(socket, [*head, sequence.to_bytes(8, "big"), payload])
            await asyncio.sleep(0)
        send_now(socket, [*last, END_OF_REPLAY, b""])


def _to_wire(event: KVEvent, kind: KVEventFormat) -> list[object] | dict[str, object]:
    name = type(event).__name__
    values = {each.name: getattr(event, each.name) for each in fields(event)}  # in vLLM's order
    return {"type": name, **values} if kind is KVEventFormat.MAP else [name, *values.values()]


def _ignore() -> None:
    """The authenticator has logged the stranger."""
