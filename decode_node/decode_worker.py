"""One task on a decode node: its blocks land (or its prompt is computed here), then its branches are generated."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from pdserve.control.errors import MalformedMessage, TaskError
from pdserve.control.first_error import first_error
from pdserve.control.handover import Handover
from pdserve.control.messages import DecodeTask, GenerationTask, Stage
from pdserve.control.node_host import AnyTask, Outbox
from pdserve.control.node_reports import sequence_specs, token_chunk
from pdserve.decode_node.config import DecodeNodeConfig
from pdserve.decode_node.landing import Landing, LandingBoard
from pdserve.engine.engine import Engine
from pdserve.engine.engine_thread import EngineThread, SequenceStream
from pdserve.engine.step_output import StepOutput
from pdserve.kvtransfer.block_hash import hash_blocks
from pdserve.kvtransfer.errors import TransferRefused
from pdserve.kvtransfer.receiver import BlockReceiver

logger = logging.getLogger(__name__)

_FINISHED = "finished"


class DecodeWorker:
    """Runs DecodeTasks, and is the HeadSink into which their blocks land, whole or shard by shard.

    Until DONE is committed the reserved blocks belong to the open transfer; from then on to the sequence. Leaving a
    task frees whatever it holds, after every landing that was asked for before: both go through the device thread.
    """

    def __init__(
        self,
        engine: EngineThread,
        config: DecodeNodeConfig,
        on_transfer: Callable[[str, str], None] = lambda transfer_id, request_id: None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._on_transfer = on_transfer
        self._board = LandingBoard()

    async def run(self, task: AnyTask, outbox: Outbox, receiver: BlockReceiver) -> None:
        """Generate the branches of one prompt; everything they held here is freed when this returns or raises.

        Raises:
            TaskError: the task is not for a decode node, its transfer failed, or the model did.
            InvalidRequest: it can never be computed here.
        """
        started_at = time.monotonic()
        match task:
            case DecodeTask(generation, None):
                async with self._engine.computing(*sequence_specs(generation)) as streams:
                    await outbox.report(Stage.PREFILLING)
                    await self._pump_all(streams, outbox, reports_cache=True)
            case DecodeTask(generation, str(transfer_id)):
                await self._run_import(generation, transfer_id, outbox, receiver)
            case _:
                raise TaskError("invalid_request", "this is a decode node; it takes DecodeTasks", retryable=False)
        logger.info(
            "finished in %.0f ms, %s",
            1000 * (time.monotonic() - started_at),
            "prompt computed here" if task.transfer_id is None else "prompt computed elsewhere",
            extra={"request_id": generation.request_id},
        )

    async def _run_import(
        self, generation: GenerationTask, transfer_id: str, outbox: Outbox, receiver: BlockReceiver
    ) -> None:
        self._on_transfer(transfer_id, generation.request_id)
        facts = self._engine.facts
        token_ids = generation.prompt_token_ids + generation.output_token_ids
        hashes = hash_blocks(token_ids, facts.block_size, generation.cache_salt, facts.digest)
        async with self._engine.importing(*sequence_specs(generation)) as streams:
            with self._board.expect(transfer_id, streams[0], hashes, outbox.branches) as landing:
                try:
                    is_handed_over = await self._land(landing)
                finally:
                    if not landing.outcome.done():
                        await receiver.abort(transfer_id, "cancelled", "the decode task was cancelled")
                if is_handed_over:
                    await outbox.report(Stage.DECODING)
                    await self._pump_all(streams, outbox, reports_cache=False)

    async def _land(self, landing: Landing) -> bool:
        """Wait for the blocks; return False when the first tokens ended every branch at the prefill node."""
        try:
            async with asyncio.timeout(self._config.offer_timeout_s):
                await landing.offered.wait()
        except TimeoutError as error:
            raise TaskError("transfer_failed", "the prefill node has offered nothing", retryable=True) from error
        ending = await asyncio.shield(landing.outcome)  # a cancelled task must not look like an outcome
        if ending is None:
            return True
        if ending.code == _FINISHED:
            return False
        raise TaskError("transfer_failed", str(ending), retryable=True)

    async def _pump_all(self, streams: Sequence[SequenceStream], outbox: Outbox, reports_cache: bool) -> None:
        """Follow every branch that is still wanted; each is freed when it ends, and what fails one fails all."""
        try:
            async with asyncio.TaskGroup() as group:
                for stream in streams:
                    if outbox.branches.is_open(stream.seq_id):
                        pumping = group.create_task(self._pump(stream, outbox, reports_cache), name=stream.seq_id)
                        pumping.add_done_callback(partial(self._let_go, stream.seq_id))
                        outbox.branches.follow(stream.seq_id, pumping)
                    else:
                        self._engine.release(stream.seq_id)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    def _let_go(self, seq_id: str, _: asyncio.Task[None]) -> None:
        self._engine.release(seq_id)

    async def _pump(self, stream: SequenceStream, outbox: Outbox, reports_cache: bool) -> None:
        """Send every token to the gateway as it is sampled."""

        def pass_on(output: StepOutput) -> bool:
            if not outbox.branches.is_open(stream.seq_id):
                return True
            if output.failure is not None:
                raise TaskError(output.failure_code, output.failure, retryable=False)
            if output.token is not None or output.finish_reason is not None:
                outbox.say(token_chunk(output, reports_cache))
            if output.finish_reason is not None:
                outbox.branches.end(stream.seq_id)
            return output.finish_reason is not None

        await stream.follow(pass_on)

    async def reserve(self, transfer_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> Sequence[int]:
        """Match the offer with its task and wait until the engine has reserved the slots."""
        landing = await self._board.find(transfer_id, self._config.offer_timeout_s)
        if list(block_hashes) != landing.block_hashes:
            landing.fail("wrong_blocks", "the offered blocks are not those of the task's prompt")
            raise TransferRefused("wrong_blocks", "these are not the blocks of the task's prompt", retryable=False)
        landing.offered.set()
        try:
            async with asyncio.timeout(self._config.room_timeout_s):
                return await asyncio.shield(landing.stream.granted)
        except TimeoutError as error:
            message = f"no room for {len(block_hashes)} blocks within {self._config.room_timeout_s:g} s"
            landing.fail("no_blocks", message)
            raise TransferRefused("no_blocks", message, retryable=True) from error
        except asyncio.CancelledError:
            landing.fail("cancelled", "the transfer ended before its blocks were reserved")
            raise

    async def land(self, transfer_id: str, blocks: Sequence[tuple[int, memoryview]], start: int) -> None:
        """Copy blocks into the cache, in the device thread."""
        seq_id = self._board.get(transfer_id).stream.seq_id
        await self._copy(lambda engine: engine.land(seq_id, blocks, start))

    async def land_heads(
        self, transfer_id: str, heads: range, blocks: Sequence[tuple[int, memoryview]], start: int
    ) -> None:
        """Copy what one shard of a tensor-parallel prefill node holds of blocks to its places in them."""
        seq_id = self._board.get(transfer_id).stream.seq_id
        await self._copy(lambda engine: engine.land_heads(seq_id, heads, blocks, start))

    async def _copy(self, write: Callable[[Engine], None]) -> None:
        copying = asyncio.ensure_future(self._engine.call(write))
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            await copying  # nothing may write into the slots once this has returned
            raise

    async def commit(self, transfer_id: str, metadata: bytes) -> None:
        """Make the landed branches runnable with the tokens sampled at the prefill node."""
        landing = self._board.get(transfer_id)
        seq_id = landing.stream.seq_id
        try:
            sampled = landing.sampled(Handover.decode(metadata))
            await self._engine.call(
                lambda engine: engine.scheduler.commit_import(seq_id, sampled.get(seq_id, ()), sampled)
            )
        except BaseException as error:
            landing.fail("commit_failed", str(error))
            if isinstance(error, MalformedMessage):
                raise TransferRefused("wrong_handover", str(error)) from error
            raise
        landing.succeed()

    async def release(self, transfer_id: str, code: str, message: str) -> None:
        """Free the slots of a transfer that ended without a commit; its task ends with them."""
        landing = self._board.peek(transfer_id)
        if landing is None:
            return
        seq_id = landing.stream.seq_id
        landing.fail(code, message)
        await self._engine.call(lambda engine: engine.scheduler.abort(seq_id))
