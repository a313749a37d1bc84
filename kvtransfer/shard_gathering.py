"""One transfer of a sink out of those of several senders, each of which holds some of the heads.

The first shard to offer has the slots reserved, for all of them. Each lands its heads by itself and waits for no other
until its DONE; the sink commits when every head has come. What ends one shard ends them all.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.kvtransfer.errors import FailureCode, TransferRefused
from pdserve.kvtransfer.layout import KVLayout
from pdserve.kvtransfer.sink import BlockSink, HeadSink
from pdserve.kvtransfer.task_set import TaskSet

_MAX_REMEMBERED = 256

EndShard = Callable[[str, int, str, str], None]  # transfer id, first head, code, message


@dataclass(slots=True)
class _Whole:
    """A transfer of the sink. `lock` keeps its calls apart; `outcome` is what waits for the commit."""

    transfer_id: str
    block_hashes: tuple[bytes, ...]
    num_tokens: int
    reservation: asyncio.Task[Sequence[int]]
    outcome: asyncio.Future[None]
    shards: list[range] = field(default_factory=list)
    metadata: dict[int, bytes] = field(default_factory=dict)  # of those that are done, by their first head
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    failure: TransferRefused | None = None
    closing: asyncio.Task[None] | None = None

    def check_open(self) -> None:
        """Raise why the transfer has ended, if it has."""
        if self.failure is not None:
            raise TransferRefused(self.failure.code, self.failure.message, self.failure.retryable)


class ShardGathering:
    """What the shards of a receiver's transfers share.

    Invariant: the sink sees of each transfer what BlockSink promises: one reserve, landings one at a time, then exactly
    one of commit and release.
    """

    def __init__(self, sink: HeadSink, heads: range, tasks: TaskSet, end_shard: EndShard) -> None:
        self.sink = sink
        self._heads = heads
        self._tasks = tasks
        self._end_shard = end_shard
        self._wholes: dict[str, _Whole] = {}
        self._failed: dict[str, _Whole] = {}  # some shards of which have not heard of it

    def has_all(self, heads: Sequence[int]) -> bool:
        """Whether these are as many heads as the receiver holds."""
        return len(heads) == len(self._heads)

    def join(self, heads: range, transfer_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> _Whole:
        """Take a shard's offer for a part of the transfer; the first begins to reserve.

        Raises:
            TransferRefused: the transfer has ended before this shard came, or the shard offers heads that another has
                offered, or other blocks than that.
        """
        self._refuse_late(heads, transfer_id)
        whole = self._wholes.get(transfer_id)
        if whole is None:
            loop = asyncio.get_running_loop()
            reserving = loop.create_task(
                _reserve(self.sink, transfer_id, block_hashes, num_tokens), name=f"kv-reserve-whole-{transfer_id}"
            )
            whole = _Whole(transfer_id, tuple(block_hashes), num_tokens, reserving, loop.create_future())
            self._wholes[transfer_id] = whole
        if (whole.block_hashes, whole.num_tokens) != (tuple(block_hashes), num_tokens):
            raise TransferRefused(FailureCode.WRONG_SHARD, "another shard has offered other blocks")
        if any(set(heads) & set(other) for other in whole.shards):
            raise TransferRefused(FailureCode.WRONG_SHARD, f"another shard has offered some of heads {heads}")
        whole.shards.append(heads)
        return whole

    def forget(self, whole: _Whole) -> None:
        """Take no more shards into a transfer."""
        if self._wholes.get(whole.transfer_id) is whole:
            del self._wholes[whole.transfer_id]

    async def fail(self, whole: _Whole, code: str, message: str) -> None:
        """End a transfer for all of its shards, unless it is being committed; at return the slots are free."""
        if whole.closing is None and not whole.outcome.done() and not self.is_complete(whole):
            self.forget(whole)
            self._failed[whole.transfer_id] = whole
            if len(self._failed) > _MAX_REMEMBERED:
                del self._failed[next(iter(self._failed))]
            whole.failure = TransferRefused(code, message, retryable=True)
            whole.closing = self._tasks.spawn(self._close(whole), name=f"kv-release-whole-{whole.transfer_id}")
        if whole.closing is not None:
            await asyncio.shield(whole.closing)

    def is_complete(self, whole: _Whole) -> bool:
        """Whether every head has come."""
        return sum(len(heads) for heads in whole.shards if heads.start in whole.metadata) == len(self._heads)

    def _refuse_late(self, heads: range, transfer_id: str) -> None:
        """Refuse a shard that comes once to a transfer that has failed; one that had been there begins it anew."""
        failed = self._failed.get(transfer_id)
        if failed is None or transfer_id in self._wholes:
            return
        if heads in failed.shards:
            del self._failed[transfer_id]
            return
        failed.shards.append(heads)
        failed.check_open()

    async def _close(self, whole: _Whole) -> None:
        assert whole.failure is not None
        code, message = whole.failure.code, whole.failure.message
        whole.outcome.set_exception(whole.failure)
        whole.outcome.exception()  # perhaps nobody waits for it
        for heads in whole.shards:
            self._end_shard(whole.transfer_id, heads.start, code, message)
        whole.reservation.cancel()
        await asyncio.wait({whole.reservation})
        if whole.reservation.cancelled() or whole.reservation.exception() is not None:
            return
        async with whole.lock:  # a landing of another shard may be under way
            await self.sink.release(whole.transfer_id, code, message)


def gathering(sink: BlockSink, layout: KVLayout, tasks: TaskSet, end_shard: EndShard) -> ShardGathering | None:
    """Return what gathers shards for a sink that takes them."""
    return ShardGathering(sink, layout.heads, tasks, end_shard) if isinstance(sink, HeadSink) else None


class ShardSink:
    """The BlockSink of one shard's transfer."""

    def __init__(self, gathering: ShardGathering, heads: range) -> None:
        self._gathering = gathering
        self._heads = heads
        self._joined: _Whole | None = None

    async def reserve(self, transfer_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> Sequence[int]:
        """Join the other shards, and reserve for all."""
        whole = self._gathering.join(self._heads, transfer_id, block_hashes, num_tokens)
        self._joined = whole
        try:
            return await asyncio.shield(whole.reservation)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                whole.check_open()  # the reservation was cancelled: another shard has ended it
            await self._gathering.fail(whole, FailureCode.SHARD_LOST, "a shard ended before the blocks were reserved")
            raise
        except Exception:
            self._gathering.forget(whole)
            raise

    async def land(self, transfer_id: str, blocks: Sequence[tuple[int, memoryview]], start: int) -> None:
        """Land this shard's heads."""
        whole = self._whole
        async with whole.lock:
            whole.check_open()
            if self._gathering.has_all(self._heads):
                await self._gathering.sink.land(transfer_id, blocks, start)
            else:
                await self._gathering.sink.land_heads(transfer_id, self._heads, blocks, start)

    async def commit(self, transfer_id: str, metadata: bytes) -> None:
        """Commit if this is the last shard; else wait for that."""
        whole = self._whole
        whole.check_open()
        whole.metadata[self._heads.start] = metadata
        if self._gathering.is_complete(whole):
            await self._commit_whole(whole)
            return
        try:
            await asyncio.shield(whole.outcome)
        except asyncio.CancelledError:
            await self._gathering.fail(whole, FailureCode.DEADLINE, "other shards had not finished by the deadline")
            raise

    async def release(self, transfer_id: str, code: str, message: str) -> None:
        """End all shards."""
        await self._gathering.fail(self._whole, code, message)

    @property
    def _whole(self) -> _Whole:
        assert self._joined is not None, "a call without a reservation"
        return self._joined

    async def _commit_whole(self, whole: _Whole) -> None:
        self._gathering.forget(whole)
        try:
            await self._gathering.sink.commit(whole.transfer_id, whole.metadata[min(whole.metadata)])
        except BaseException as error:
            whole.outcome.set_exception(TransferRefused(FailureCode.COMMIT_FAILED, str(error) or type(error).__name__))
            whole.outcome.exception()
            raise
        whole.outcome.set_result(None)


async def _reserve(sink: HeadSink, transfer_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> Sequence[int]:
    return await sink.reserve(transfer_id, block_hashes, num_tokens)
