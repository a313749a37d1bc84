"""KV events of a real engine: whoever follows them knows what each tier holds."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from pdserve.control.kv_event_feed import KVEventFeed, kv_events
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.tier_moves import BlockChange, Tier
from pdserve.kvtransfer.kv_events import END_OF_REPLAY, BlockRemoved, BlockStored, KVEventConfig

_SAMPLING = SamplingParams(max_tokens=2, temperature=0.0, seed=0, ignore_eos=True)


def test_blocks_that_follow_one_another_share_an_event() -> None:
    def stored(key: bytes, parent: bytes | None, tier: Tier = Tier.DEVICE) -> BlockChange:
        return BlockChange(tier, True, key, parent, (1, 2))

    def removed(key: bytes, tier: Tier = Tier.DEVICE) -> BlockChange:
        return BlockChange(tier, False, key, None, (1, 2))

    changes = [stored(b"a", None), stored(b"b", b"a"), stored(b"c", b"x"), removed(b"c"), removed(b"b")]
    changes += [removed(b"d", Tier.HOST), stored(b"d", b"c", Tier.DISK)]

    assert kv_events(changes, 2) == [
        BlockStored((b"a", b"b"), None, (1, 2, 1, 2), 2, medium="GPU"),
        BlockStored((b"c",), b"x", (1, 2), 2, medium="GPU"),
        BlockRemoved((b"c", b"b"), "GPU"),
        BlockRemoved((b"d",), "CPU"),
        BlockStored((b"d",), b"c", (1, 2), 2, medium="DISK"),
    ]


@pytest.mark.parametrize("host_blocks", [0, 6])
async def test_a_subscriber_knows_what_each_tier_holds(tiny_model: Any, host_blocks: int) -> None:
    context = zmq.asyncio.Context()
    engine = Engine.load(_config(tiny_model(), host_blocks))
    try:
        async with (
            EngineThread.start(engine) as thread,
            KVEventFeed.open(context, KVEventConfig(), thread) as feed,
        ):
            assert feed.endpoints is not None
            for number in range(5):
                await _run(thread, tuple(range(5 + number, 45 + number)))
            load = await thread.call(lambda engine: engine.load_now())
            usage = {tier.tier.value: tier.num_blocks for tier in load.tiers}
            held, tokens = await _replayed(context, feed.endpoints[1])
    finally:
        context.destroy(linger=0)

    assert {medium: len(keys) for medium, keys in held.items() if keys} == {
        name: usage[tier] for name, tier in (("GPU", "device"), ("CPU", "host")) if usage.get(tier)
    }
    assert tuple(range(5, 9)) in tokens


async def test_without_a_config_nothing_is_bound_or_logged(tiny_model: Any) -> None:
    context = zmq.asyncio.Context()
    engine = Engine.load(replace(_config(tiny_model(), 0), logs_cache_changes=False))
    try:
        async with EngineThread.start(engine) as thread, KVEventFeed.open(context, None, thread) as feed:
            await _run(thread, tuple(range(5, 45)))

            assert (feed.endpoints, feed.parts()) == (None, ())
            assert await thread.call(lambda engine: engine.tiers.take_changes()) == []
    finally:
        context.destroy(linger=0)


def _config(model_dir: Path, host_blocks: int) -> EngineConfig:
    return EngineConfig(
        model_dir=model_dir,
        block_size=4,
        num_blocks=12,
        kv_host_memory_bytes=host_blocks * 4096,
        logs_cache_changes=True,
    )


async def _run(thread: EngineThread, prompt: tuple[int, ...]) -> None:
    async with asyncio.timeout(60), thread.computing(SequenceSpec("a", prompt, _SAMPLING)) as (stream,):
        while (await stream.next()).finish_reason is None:
            pass


async def _replayed(context: zmq.asyncio.Context, endpoint: str) -> tuple[dict[str, set[bytes]], set[tuple[int, ...]]]:
    """Follow all events from the first, as vLLM's subscribers do; every hash must be known before it is removed."""
    held: dict[str, set[bytes]] = {}
    tokens: set[tuple[int, ...]] = set()
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        await socket.send_multipart([b"", (0).to_bytes(8, "big")])
        async with asyncio.timeout(30):
            while True:
                _, sequence, payload = await socket.recv_multipart()
                if sequence == END_OF_REPLAY:
                    return held, tokens
                for event in msgpack.unpackb(payload)[1]:
                    _follow(event, held, tokens)


def _follow(event: list[Any], held: dict[str, set[bytes]], tokens: set[tuple[int, ...]]) -> None:
    match event:
        case ["AllBlocksCleared"]:
            held.clear()
        case ["BlockStored", hashes, _, token_ids, block_size, _, medium, _]:
            assert len(token_ids) == len(hashes) * block_size
            assert held.setdefault(medium, set()).isdisjoint(hashes)
            held[medium].update(hashes)
            tokens.update(
                tuple(token_ids[start : start + block_size]) for start in range(0, len(token_ids), block_size)
            )
        case ["BlockRemoved", hashes, medium]:
            assert held[medium].issuperset(hashes)
            held[medium].difference_update(hashes)
