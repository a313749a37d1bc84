"""Whether a sender shares memory with a receiver that offers it: as configured, and as measured on this machine."""

import asyncio
import logging

from pdserve.kvtransfer.config import SenderConfig
from pdserve.kvtransfer.counters import TransferCounters
from pdserve.kvtransfer.layout import KVLayout
from pdserve.kvtransfer.ring_door import hand_over_ring
from pdserve.kvtransfer.ring_probe import probed_rates
from pdserve.kvtransfer.shared_ring import RingShape, SharedRing, UnusableRing
from pdserve.kvtransfer.sockets import is_abstract_socket

logger = logging.getLogger(__name__)

_TIMEOUT_S = 3.0


async def share_memory(
    offer: tuple[str, bytes] | None, config: SenderConfig, credit_bytes: int, wire: KVLayout, counters: TransferCounters
) -> SharedRing | None:
    """Hand a ring to the receiver of whose handshake `offer` is a part; None where blocks travel over the socket.

    Never raises for the want of it: everything works without.
    """
    if offer is None or config.shared_memory == "never":
        return None
    name, token = offer
    if not is_abstract_socket(name):
        return None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            if config.shared_memory == "auto":
                rates = await asyncio.to_thread(probed_rates)
                logger.info("shared memory %.1f GB/s, socket %.1f GB/s", rates.shared / 1e9, rates.socket / 1e9)
                if not rates.prefers_shared:
                    return None
            shape = RingShape.within(min(config.ring_bytes, credit_bytes), wire.block_size_bytes)
            return await hand_over_ring(name, token, shape)
    except (UnusableRing, OSError, TimeoutError) as error:
        counters.shared_memory_failures += 1
        logger.info("blocks travel over the socket, not through shared memory: %s", error or "it took too long")
        return None
