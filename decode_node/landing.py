"""Where decode tasks and the transfers that feed them find each other, whichever comes first."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pdserve.control.errors import MalformedMessage
from pdserve.control.handover import Handover
from pdserve.control.task_branches import TaskBranches
from pdserve.engine.engine_thread import SequenceStream
from pdserve.kvtransfer.errors import TransferRefused


@dataclass(frozen=True, slots=True)
class LandingFailure:
    """Why the blocks of a task will not come."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class Landing:
    """A task that waits for its blocks. `outcome` is None once they are the sequence's, else why they are not.

    `stream` is that of the first branch, which stands for all until the blocks are theirs.
    """

    def __init__(self, stream: SequenceStream, block_hashes: list[bytes], branches: TaskBranches) -> None:
        self._branches = branches
        self.stream = stream
        self.block_hashes = block_hashes
        self.offered = asyncio.Event()
        self.outcome: asyncio.Future[LandingFailure | None] = asyncio.get_running_loop().create_future()

    def sampled(self, handover: Handover) -> dict[str, tuple[int, ...]]:
        """Return the tokens of each branch that goes on here; the others have ended, at the prefill node or by cancel.

        Raises:
            MalformedMessage: the hand-over is not of as many branches as the task has.
        """
        attempt_ids = self._branches.attempt_ids
        if len(handover.sampled_token_ids) != len(attempt_ids):
            message = f"{len(handover.sampled_token_ids)} branches where the task has {len(attempt_ids)}"
            raise MalformedMessage("handover", message)
        of_each = dict(zip(attempt_ids, handover.sampled_token_ids, strict=True))
        for attempt_id, token_ids in of_each.items():
            if not token_ids:
                self._branches.end(attempt_id)
        return {
            attempt_id: token_ids for attempt_id, token_ids in of_each.items() if self._branches.is_open(attempt_id)
        }

    def succeed(self) -> None:
        """The blocks belong to the sequence."""
        if not self.outcome.done():
            self.outcome.set_result(None)

    def fail(self, code: str, message: str) -> None:
        """The blocks will not come; only the first reason counts."""
        self.offered.set()
        if not self.outcome.done():
            self.outcome.set_result(LandingFailure(code, message))


class LandingBoard:
    """Landings by transfer id, and the offers that came before their tasks (bounded by the receiver's open offers)."""

    def __init__(self) -> None:
        self._landings: dict[str, Landing] = {}
        self._awaited: dict[str, asyncio.Future[Landing]] = {}

    @contextmanager
    def expect(
        self, transfer_id: str, stream: SequenceStream, block_hashes: list[bytes], branches: TaskBranches
    ) -> Iterator[Landing]:
        """Announce a task; inside the block an offer finds it."""
        landing = self._landings[transfer_id] = Landing(stream, block_hashes, branches)
        if (awaited := self._awaited.get(transfer_id)) is not None and not awaited.done():
            awaited.set_result(landing)
        try:
            yield landing
        finally:
            del self._landings[transfer_id]

    async def find(self, transfer_id: str, timeout_s: float) -> Landing:
        """Wait for the task that a transfer belongs to.

        Raises:
            TransferRefused: no task has come in time.
        """
        if (landing := self._landings.get(transfer_id)) is not None:
            return landing
        awaited: asyncio.Future[Landing] = asyncio.get_running_loop().create_future()
        self._awaited[transfer_id] = awaited
        try:
            async with asyncio.timeout(timeout_s):
                return await awaited
        except TimeoutError as error:
            message = f"no task has asked for transfer {transfer_id}"
            raise TransferRefused("unexpected_transfer", message, retryable=True) from error
        finally:
            del self._awaited[transfer_id]

    def get(self, transfer_id: str) -> Landing:
        """Return the landing of a transfer that was reserved.

        Raises:
            TransferRefused: its task has ended.
        """
        if (landing := self._landings.get(transfer_id)) is not None:
            return landing
        raise TransferRefused("cancelled", "the decode task has ended", retryable=False)

    def peek(self, transfer_id: str) -> Landing | None:
        """Return the landing of a transfer, or None if its task has ended."""
        return self._landings.get(transfer_id)
