"""One node of the prefix tree: a block's worth of tokens, and where the block is. Only the tree mutates it."""

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from pdserve.engine.block_pool import BlockId
from pdserve.engine.tier_moves import DiskBlock, HostSlot, Tier

Edge = tuple[int, ...]


class PrefixNode:
    """A run of tokens from a root to here. On the device it has a block, in the host tier a slot, on disk its key.

    `is_fetching`: in the host tier, but its bytes are still being read from disk.
    """

    __slots__ = (
        "block_id",
        "children",
        "edge",
        "is_fetching",
        "key",
        "last_used",
        "num_children",
        "parent",
        "salt",
        "slot",
        "tier",
    )

    def __init__(self, parent: "PrefixNode | None", salt: str, edge: Edge, key: bytes, last_used: int) -> None:
        self.parent = parent
        self.salt = salt
        self.edge = edge
        self.key = key
        self.last_used = last_used
        self.tier = Tier.DEVICE
        self.block_id: BlockId | None = None
        self.slot: HostSlot | None = None
        self.is_fetching = False
        self.children: dict[Edge, PrefixNode] = {}
        self.num_children = dict.fromkeys(Tier, 0)  # by tier

    @classmethod
    def root(cls, identity: str, salt: str, last_used: int) -> "PrefixNode":
        """Return the root of a salt; `identity` is that of the model and of the shape of its blocks."""
        hasher = blake2b(digest_size=32, person=b"prefix-root")
        for field in (identity.encode(), salt.encode()):
            hasher.update(len(field).to_bytes(8, "little") + field)
        return cls(None, salt, (), hasher.digest(), last_used)

    def add_child(self, edge: Edge, last_used: int) -> "PrefixNode":
        """Attach a node on the device that has no block yet."""
        hasher = blake2b(self.key, digest_size=32, person=b"prefix-block")
        hasher.update(array("Q", edge))
        child = self.children[edge] = PrefixNode(self, self.salt, edge, hasher.digest(), last_used)
        self.num_children[Tier.DEVICE] += 1
        return child

    @property
    def is_attached(self) -> bool:
        """Whether the node is in the tree."""
        return self.parent is not None and self.parent.children.get(self.edge) is self

    @property
    def is_leaf_of_tier(self) -> bool:
        """Whether nothing that follows is in the same tier; only such a block may leave it."""
        return self.parent is not None and self.num_children[self.tier] == 0

    def move_to(self, tier: Tier) -> None:
        """Change the tier, and the parent's count with it."""
        assert self.parent is not None
        self.parent.num_children[self.tier] -= 1
        self.parent.num_children[tier] += 1
        self.tier = tier

    def detach(self) -> None:
        """Leave the parent."""
        assert self.parent is not None
        del self.parent.children[self.edge]
        self.parent.num_children[self.tier] -= 1

    def disk_block(self) -> DiskBlock:
        """Return what names this block on disk."""
        assert self.parent is not None
        return DiskBlock(self.key, self.parent.key, self.salt, self.edge)


def check_nodes(nodes: Sequence[PrefixNode], num_counted: Mapping[Tier, int], max_on_disk: int) -> None:
    """Prove that all nodes of a tree are where their tier says, and are as many as were counted.

    Raises:
        RuntimeError: they are not, a block is remembered twice, or a tier rises along a path.
    """
    block_ids = [node.block_id for node in nodes if node.tier is Tier.DEVICE]
    num_blocks = num_counted[Tier.DEVICE]
    if len(block_ids) != num_blocks or len(set(block_ids)) != num_blocks:
        raise RuntimeError(f"prefix tree: {num_blocks} blocks counted, {len(block_ids)} found")
    order = list(Tier)
    for node in nodes:
        assert node.parent is not None
        is_rising = node.parent.parent is not None and order.index(node.tier) < order.index(node.parent.tier)
        has_device = (node.block_id is None) == (node.tier is Tier.DEVICE)
        if is_rising or has_device or (node.slot is None) == (node.tier is Tier.HOST):
            raise RuntimeError(f"prefix tree: a block of the tier {node.tier} is out of place")
    num_on_disk = sum(1 for node in nodes if node.tier is Tier.DISK)
    if num_on_disk != num_counted[Tier.DISK] or num_on_disk > max_on_disk:
        raise RuntimeError(f"prefix tree: {num_on_disk} blocks on disk, {num_counted[Tier.DISK]} counted")
