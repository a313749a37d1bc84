"""Which offers a receiver declines by itself, before its sink is asked."""

from collections.abc import Collection

from pdserve.kvtransfer.config import ReceiverConfig
from pdserve.kvtransfer.errors import FailureCode, TransferRefused
from pdserve.kvtransfer.frames import Offer
from pdserve.kvtransfer.layout import KVLayout

TransferKey = tuple[str, int]  # id, first head of the wire's blocks: what tells the shards of one transfer apart


def refusal_of(
    offer: Offer, first_head: int, layout: KVLayout, open_keys: Collection[TransferKey], config: ReceiverConfig
) -> TransferRefused | None:
    """Return why an offer cannot be taken while others are open; None if it can."""
    if (offer.transfer_id, first_head) in open_keys:
        # It may be the last start's of a sender, which is just being released: then the same may be offered again.
        return TransferRefused(FailureCode.DUPLICATE_TRANSFER, "a transfer of this id is open here", retryable=True)
    if len(open_keys) >= config.max_open_transfers:
        return TransferRefused(FailureCode.OVERLOADED, f"{len(open_keys)} transfers are open", retryable=True)
    num_blocks = layout.num_blocks(offer.num_tokens)
    if num_blocks == 0 or num_blocks != len(offer.block_hashes):
        return TransferRefused(FailureCode.PROTOCOL, f"{len(offer.block_hashes)} hashes for {offer.num_tokens} tokens")
    return None
