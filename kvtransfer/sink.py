"""The seam between the transfer and the node that receives: what a decode node implements."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class BlockSink(Protocol):
    """Owner of the slots into which blocks land.

    For each transfer the calls come one after the other: reserve, then land any number of times, then
    exactly one of commit and release. Calls of different transfers overlap. No call may block the event
    loop for long.
    """

    async def reserve(self, transfer_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> Sequence[int]:
        """Reserve slots for the blocks that are not here yet and return their indexes in the offer.

        May wait for room. If it raises or is cancelled nothing may stay reserved; once it has returned the
        slots belong to the transfer until commit or release.

        Raises:
            TransferRefused: the offer is not wanted; its code, message and retryable go to the sender.
        """
        ...

    async def land(self, transfer_id: str, blocks: Sequence[tuple[int, memoryview]], start: int) -> None:
        """Copy verified bytes into their slots, from the byte `start` of each block on: whole blocks, or the layers of
        them that are there, in order. The views are valid only during the call; once it has ended, also by an error or
        a cancellation, it must not write any more.

        Raises:
            TransferRefused: the owner of the slots has ended meanwhile; the transfer ends with this code.
        """
        ...

    async def commit(self, transfer_id: str, metadata: bytes) -> None:
        """Take the complete blocks over. From this call on the slots are the sink's, also if it raises."""
        ...

    async def release(self, transfer_id: str, code: str, message: str) -> None:
        """Free the slots: the transfer ended without a commit."""
        ...


@runtime_checkable
class HeadSink(BlockSink, Protocol):
    """A sink into whose blocks the heads of different senders may land: the shards of a tensor-parallel node."""

    async def land_heads(
        self, transfer_id: str, heads: range, blocks: Sequence[tuple[int, memoryview]], start: int
    ) -> None:
        """Copy the heads that one sender holds into their places, from the byte `start` of a block of these heads on
        (see `place_heads`); else as `land`."""
        ...
