"""One prompt on a prefill node: computed in chunks, its blocks shipped meanwhile, its first token sent at once."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.control.errors import TaskError
from pdserve.control.first_error import first_error
from pdserve.control.handover import Handover
from pdserve.control.messages import PrefillTask, Stage
from pdserve.control.node_host import AnyTask, Outbox
from pdserve.control.node_reports import sequence_specs, token_chunk
from pdserve.engine.block_pool import BlockId
from pdserve.engine.engine_thread import EngineThread, SequenceStream
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.step_output import StepOutput
from pdserve.kvtransfer.block_hash import hash_blocks
from pdserve.kvtransfer.errors import TransferError
from pdserve.kvtransfer.outgoing import OutgoingTransfer
from pdserve.kvtransfer.peer_address import PeerAddress
from pdserve.kvtransfer.sender import BlockSender

logger = logging.getLogger(__name__)

# Through shared memory so much is over in some 2 ms, and a piece of a block costs both ends as much as copying 300 KiB:
# fewer bytes wait for the layers that follow.
_LEAST_SHARED_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Progress:
    """Blocks [0, num_ready) of the prompt are final; what was sampled of each branch comes with the last of them."""

    num_ready: int
    block_table: tuple[BlockId, ...]
    handover: Handover | None


_ProgressQueue = asyncio.Queue[_Progress | LayerProgress]


class PrefillWorker:
    """Runs PrefillTasks. Until DONE is acknowledged the blocks are this node's; then they are its cache's."""

    def __init__(self, engine: EngineThread, sender: BlockSender, transfer_timeout_s: float) -> None:
        self._engine = engine
        self._sender = sender
        self._transfer_timeout_s = transfer_timeout_s

    async def run(self, task: AnyTask, outbox: Outbox) -> None:
        """Compute, ship and hand over one prompt; everything it held here is freed when this returns or raises.

        Raises:
            TaskError: the task is not for a prefill node, the transfer failed, or the model did.
            InvalidRequest: the prompt can never be computed here.
        """
        generation = task.task
        if not isinstance(task, PrefillTask):
            raise TaskError("invalid_request", "this is a prefill node; it takes PrefillTasks", retryable=False)
        started_at = time.monotonic()
        progress: _ProgressQueue = asyncio.Queue()  # a few entries a step of this sequence: layers, then the whole
        specs = sequence_specs(generation, is_export=True)
        # For who wants to know of layers the engine leaves its kernels after each one, and wakes this loop ten times.
        on_layers = progress.put_nowait if self._may_ship_layers(task) else None
        async with self._engine.computing(*specs, on_layers=on_layers) as streams:
            await outbox.report(Stage.PREFILLING)
            try:
                transfer = await self._offer(task)
                await self._compute_and_ship(streams, transfer, progress, outbox)
            except TransferError as error:
                raise TaskError("transfer_failed", str(error), error.retryable) from error
        logger.info(
            "prefilled %d tokens in %.0f ms, hand-over included",
            len(generation.prompt_token_ids) + len(generation.output_token_ids),
            1000 * (time.monotonic() - started_at),
            extra={"request_id": generation.request_id},
        )

    def _may_ship_layers(self, task: PrefillTask) -> bool:
        num_tokens = len(task.task.prompt_token_ids) + len(task.task.output_token_ids)
        return self._sender.may_send_layers(_peer_of(task), num_tokens, _LEAST_SHARED_BYTES)

    async def _offer(self, task: PrefillTask) -> OutgoingTransfer:
        generation = task.task
        token_ids = generation.prompt_token_ids + generation.output_token_ids
        digest = self._engine.facts.digest
        timeout_s = min(self._transfer_timeout_s, generation.timeout_s)
        return await self._sender.offer(
            _peer_of(task),
            task.transfer_id,
            lambda block_size: hash_blocks(token_ids, block_size, generation.cache_salt, digest),
            len(token_ids),
            timeout_s,
            label=generation.request_id,
        )

    async def _compute_and_ship(
        self, streams: Sequence[SequenceStream], transfer: OutgoingTransfer, progress: _ProgressQueue, outbox: Outbox
    ) -> None:
        ending = "cancelled"
        try:
            async with asyncio.TaskGroup() as group:
                shipping = group.create_task(self._ship(transfer, progress, outbox), name="ship")
                if await self._compute(streams, progress, outbox):
                    shipping.cancel()  # the first token ended every branch: there is nothing to hand over
            ending = "finished"
        except BaseExceptionGroup as errors:
            ending = "failed"
            raise first_error(errors) from errors
        finally:
            await transfer.abort(ending, f"the prefill task has {ending}")

    async def _compute(self, streams: Sequence[SequenceStream], progress: _ProgressQueue, outbox: Outbox) -> bool:
        """Follow the computation to the first token of each branch, which goes to the gateway before anything else.

        Return whether those tokens ended every branch. The first branch leads: the blocks are reported with it.
        """
        leader, *followers = streams
        while (output := await leader.next()).token is None and output.finish_reason is None:
            _raise_failure(output)
            progress.put_nowait(_Progress(self._num_full(output), output.exported_blocks, None))
        sampled = []
        for first in (output, *[await follower.next() for follower in followers]):
            _raise_failure(first)
            is_wanted = outbox.branches.is_open(first.seq_id)
            if is_wanted:
                outbox.say(token_chunk(first))
            token_id = None if first.token is None or first.finish_reason is not None else first.token.token_id
            sampled.append((token_id,) if is_wanted and token_id is not None else ())
        if not any(sampled):
            return True
        num_blocks = -(-output.num_computed_tokens // self._engine.facts.block_size)
        progress.put_nowait(_Progress(num_blocks, output.exported_blocks, Handover(tuple(sampled))))
        return False

    def _num_full(self, output: StepOutput) -> int:
        return output.num_computed_tokens // self._engine.facts.block_size

    async def _ship(self, transfer: OutgoingTransfer, progress: _ProgressQueue, outbox: Outbox) -> None:
        """Send blocks, and of those that a step is computing their first layers, as they become final; then hand the
        sequence over."""
        await transfer.granted()
        await outbox.report(Stage.TRANSFERRING)
        num_sent = 0
        while True:
            step = await progress.get()
            if isinstance(step, LayerProgress):
                if progress.empty():  # else more is final by now
                    await self._ship_layers(transfer, step, num_sent)
                continue
            runs = self._engine.block_runs(step.block_table[num_sent : step.num_ready])
            first = num_sent
            await transfer.send_blocks((first + index, memory) for index, memory in runs)
            num_sent = max(num_sent, step.num_ready)
            if step.handover is not None:
                await transfer.finish(step.handover.encode())
                return

    async def _ship_layers(self, transfer: OutgoingTransfer, step: LayerProgress, num_sent: int) -> None:
        blocks = range(max(step.first_block, num_sent), step.end_block)
        table = step.block_table
        if transfer.are_layers_due(blocks, step.num_layers, _LEAST_SHARED_BYTES):
            memory = ((each, self._engine.block_bytes(table[each])) for each in blocks)
            await transfer.send_layers(memory, step.num_layers)


def _peer_of(task: PrefillTask) -> PeerAddress:
    return PeerAddress(task.decode_endpoint, task.decode_node_id, task.decode_incarnation)


def _raise_failure(output: StepOutput) -> None:
    if output.failure is not None:
        raise TaskError(output.failure_code, output.failure, retryable=False)
