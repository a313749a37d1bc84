"""A node's KV events: what its prefix tree stores and evicts, in each tier, to whoever subscribes."""

from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager

import zmq.asyncio

from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.tier_moves import BlockChange, Tier
from pdserve.kvtransfer.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventConfig,
    KVEventPublisher,
)

_MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK"}  # vLLM's names, whatever the device is


class KVEventFeed:
    """Between an engine thread and a publisher; without one it says nothing, and costs nothing."""

    def __init__(self, publisher: KVEventPublisher | None) -> None:
        self._publisher = publisher

    @classmethod
    @asynccontextmanager
    async def open(
        cls, context: zmq.asyncio.Context, config: KVEventConfig | None, engine: EngineThread
    ) -> AsyncIterator["KVEventFeed"]:
        """Publish until the block is left; None publishes nothing."""
        if config is None:
            yield cls(None)
            return
        async with KVEventPublisher.bind(context, config) as publisher:
            publisher.publish([AllBlocksCleared()])
            block_size = engine.facts.block_size
            engine.on_cache_changes(lambda changes: publisher.publish(kv_events(changes, block_size)))
            yield cls(publisher)

    @property
    def endpoints(self) -> tuple[str, str] | None:
        """Where events are published and replayed; None where they are not."""
        return None if self._publisher is None else (self._publisher.endpoint, self._publisher.replay_endpoint)

    def parts(self) -> tuple[Coroutine[None, None, None], ...]:
        """Return what ends, by itself, only when publishing has failed."""
        return () if self._publisher is None else (self._publisher.watch(),)


def kv_events(changes: Sequence[BlockChange], block_size: int) -> list[KVEvent]:
    """Return the changes as events, in order; blocks that follow one another share one."""
    events: list[KVEvent] = []
    for change in changes:
        last, medium = events[-1] if events else None, _MEDIA[change.tier]
        match last:
            case BlockStored() if change.is_stored and last.medium == medium and _follows(last, change):
                keys = (*last.block_hashes, change.key)
                token_ids = last.token_ids + change.token_ids
                events[-1] = BlockStored(keys, last.parent_block_hash, token_ids, block_size, medium=medium)
            case BlockRemoved() if not change.is_stored and last.medium == medium:
                events[-1] = BlockRemoved((*last.block_hashes, change.key), medium)
            case _ if change.is_stored:
                events.append(
                    BlockStored((change.key,), change.parent_key, change.token_ids, block_size, medium=medium)
                )
            case _:
                events.append(BlockRemoved((change.key,), medium))
    return events


def _follows(stored: BlockStored, change: BlockChange) -> bool:
    return change.parent_key == stored.block_hashes[-1]
