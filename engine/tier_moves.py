"""The tiers in which KV blocks are kept, and the moves between them as the prefix tree decides them. Torch-free."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from pdserve.engine.block_pool import BlockId

HostSlot = NewType("HostSlot", int)


class Tier(StrEnum):
    """Where a remembered block is, from the fastest down; along a path of the tree the tier never rises."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class TierLimits:
    """How much is kept below the device, in blocks. `max_disk_jobs` bounds the reads and the writes under way."""

    num_host_slots: int = 0
    num_disk_blocks: int = 0
    max_disk_jobs: int = 16


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """All that names a block on disk. The key covers model, salt and every token up to the block's last."""

    key: bytes
    parent_key: bytes
    salt: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoreToHost:
    """Copy a block of the device into a host slot."""

    block_id: BlockId
    slot: HostSlot


@dataclass(frozen=True, slots=True)
class LoadFromHost:
    """Verify a host slot and copy it into a block of the device."""

    slot: HostSlot
    block_id: BlockId


@dataclass(frozen=True, slots=True)
class StoreToDisk:
    """Write a host slot to disk; the slot may be used again once this was taken up."""

    slot: HostSlot
    block: DiskBlock


@dataclass(frozen=True, slots=True)
class LoadFromDisk:
    """Read a block into a host slot and take it off the disk; `PrefixTree.fetched` must be told how that went."""

    key: bytes
    slot: HostSlot


@dataclass(frozen=True, slots=True)
class DropFromDisk:
    """Delete a block from disk."""

    key: bytes


Move = StoreToHost | LoadFromHost | StoreToDisk | LoadFromDisk | DropFromDisk


@dataclass(frozen=True, slots=True)
class BlockChange:
    """Something came into a tier or left it, in order. `token_ids` are the block's own."""

    tier: Tier
    is_stored: bool
    key: bytes
    parent_key: bytes | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TierUsage:
    """One tier as it is now, and what became of the blocks that were looked for.

    Every full block of a prompt is looked for once, from the fastest tier down: it is a hit of the tier that has it and
    a miss of those above. `num_corrupt` counts blocks that were there but failed their check, and were computed.
    """

    tier: Tier
    num_blocks: int
    max_blocks: int
    size_bytes: int
    num_hits: int = 0
    num_misses: int = 0
    num_corrupt: int = 0
