"""Which token runs live in which blocks: a radix tree whose edges are whole blocks of token ids, one root a salt.

A lookup compares the token ids themselves, so no hash collision can serve another prompt's keys and values. Blocks that
leave the device may live on in host memory and then on disk: the tree decides, `moves` tell a mover what to copy.
"""

from collections.abc import Iterator, Sequence

from pdserve.engine.block_pool import BlockId, BlockPool
from pdserve.engine.host_slots import HostSlots
from pdserve.engine.leaf_order import LeafOrder
from pdserve.engine.prefix_node import Edge, PrefixNode, check_nodes
from pdserve.engine.tier_counts import TierCounts
from pdserve.engine.tier_moves import (
    BlockChange,
    DiskBlock,
    DropFromDisk,
    HostSlot,
    LoadFromDisk,
    Move,
    StoreToDisk,
    StoreToHost,
    Tier,
    TierLimits,
    TierUsage,
)

_NO_TIERS = TierLimits()


class PrefixTree:
    """Remembers full blocks after their sequences are gone and gives them back least recently used leaf first.

    The tree holds no block against its sequences: it only remembers (`BlockPool.remember`). A block it remembers is
    reused through `match`, whose caller must `share` the result at once, before anything else allocates.

    Along a path the tier never rises: device blocks, then host slots, then disk. A leaf of a tier moves to the next one
    below, or is dropped with all that follows it where there is no room. Moves must be performed in their order before
    anything is written into a block or a slot that was freed after they were decided.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        limits: TierLimits = _NO_TIERS,
        identity: str = "",
        *,
        logs: bool = False,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._limits = limits
        self._identity = identity
        self._roots: dict[str, PrefixNode] = {}
        self._clock = 0
        self._counts = TierCounts()
        self._leaves = LeafOrder()
        self._fetching: dict[bytes, PrefixNode] = {}
        self._writing: dict[bytes, PrefixNode] = {}
        self._num_disk_jobs = 0
        self._moves: list[Move] = []
        self._changes: list[BlockChange] | None = [] if logs else None
        self.slots = HostSlots(limits.num_host_slots)

    @property
    def num_blocks(self) -> int:
        """Blocks of the device that the tree remembers, held or not."""
        return self._counts.nodes[Tier.DEVICE]

    @property
    def num_fetching(self) -> int:
        """Blocks that are being read from disk."""
        return len(self._fetching)

    def match(self, token_ids: Sequence[int], salt: str) -> list[BlockId]:
        """Return the device's blocks of the longest remembered run of full blocks that `token_ids` starts with."""
        block_ids: list[BlockId] = []
        for node in self.touch(token_ids, salt):
            if node.block_id is None:
                break
            block_ids.append(node.block_id)
        return block_ids

    def insert(self, token_ids: Sequence[int], block_ids: Sequence[BlockId], salt: str) -> None:
        """Remember the full blocks of `token_ids`, which live in `block_ids` and are held by the caller.

        A run that the device has already keeps its block; the caller's duplicate stays the caller's alone. One that is
        kept further down comes up: the caller's block takes its place.
        """
        self._clock += 1
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = PrefixNode.root(self._identity, salt, self._clock)
        for edge, block_id in zip(self._edges(token_ids), block_ids, strict=False):
            child = node.children.get(edge)
            if child is None:
                child = node.add_child(edge, self._clock)
                self._counts.nodes[Tier.DEVICE] += 1
                self._log(child, is_stored=True)
            elif child.tier is not Tier.DEVICE:
                self._let_go(child)
                self._change_tier(child, Tier.DEVICE)
            if child.block_id is None:
                child.block_id = block_id
                self._pool.remember(block_id)
            child.last_used = self._clock
            node = child
        self._leaves.push(node, self._total)
        self._drop_root_if_empty(salt)

    def evict(self, num_blocks: int) -> int:
        """Free up to `num_blocks` unheld blocks of the device, least recently used leaf first; return how many."""
        return self._leaves.evict(Tier.DEVICE, num_blocks, self._is_held, self._leave_device)

    def clear(self) -> int:
        """Forget every block that nobody holds, in all tiers; return how many the device had."""
        num_before = self.num_blocks
        for tier in (Tier.DISK, Tier.HOST, Tier.DEVICE):
            self._leaves.evict(tier, self._total, self._is_held, self._drop)
        return num_before - self.num_blocks

    def touch(self, token_ids: Sequence[int], salt: str) -> list[PrefixNode]:
        """Mark the longest remembered run that `token_ids` starts with as used, and return it, whatever the tiers."""
        node = self._roots.get(salt)
        if node is None:
            return []
        self._clock += 1
        path: list[PrefixNode] = []
        for edge in self._edges(token_ids):
            child = node.children.get(edge)
            if child is None:
                break
            child.last_used = self._clock
            if child.tier is not node.tier:
                self._leaves.push(node, self._total)
            path.append(child)
            node = child
        self._leaves.push(node, self._total)
        return path

    def count_lookup(self, token_ids: Sequence[int], salt: str) -> None:
        """Count, once for a sequence, in which tiers the blocks of its prompt are."""
        tiers = [node.tier for node in self.touch(token_ids, salt)]
        self._counts.count_lookup(tiers, len(token_ids) // self._block_size)

    def restored(self, node: PrefixNode, block_id: BlockId) -> None:
        """A block of the host tier was copied into `block_id`, which the caller holds, and passed its check."""
        self._let_go(node)
        node.block_id = block_id
        self._change_tier(node, Tier.DEVICE)
        self._pool.remember(block_id)
        self._leaves.push(node, self._total)

    def spoiled(self, node: PrefixNode) -> None:
        """A block failed its check on the way back: it is dropped with all that follows it."""
        self._counts.corrupt[node.tier] += 1
        self._drop(node)

    def count_corrupt_swap(self) -> None:
        """A block that a preempted sequence had in the host tier failed its check."""
        self._counts.corrupt[Tier.HOST] += 1

    def fetch(self, path: Sequence[PrefixNode]) -> None:
        """Begin to read into the host tier what comes next on `path` and is on disk, as far as jobs and slots allow."""
        for node in path:
            if node.tier is not Tier.DISK:
                continue
            if not self._has_slot() or self._num_disk_jobs >= self._limits.max_disk_jobs:
                return
            if not node.is_attached or node.parent is None or node.parent.tier is Tier.DISK:
                return  # making room for it took what it follows
            node.slot = self.slots.take_for_tree()
            node.is_fetching = True
            self._fetching[node.key] = node
            self._num_disk_jobs += 1
            self._moves.append(LoadFromDisk(node.key, node.slot))
            self._change_tier(node, Tier.HOST)

    def fetched(self, key: bytes, is_sound: bool) -> HostSlot | None:
        """A read has ended; return the slot that its bytes belong into, or None if nobody wants them any more.

        Unless it was sound the block is dropped with all that follows it.
        """
        self._num_disk_jobs -= 1
        node = self._fetching.pop(key, None)
        if node is None:
            return None
        node.is_fetching = False
        if not is_sound:
            self._counts.corrupt[Tier.DISK] += 1
            self._drop(node)
            return None
        self._leaves.push(node, self._total)
        return node.slot

    def written(self, key: bytes, is_done: bool) -> None:
        """A write to disk has ended; if it failed the block is forgotten with all that follows it."""
        self._num_disk_jobs -= 1
        node = self._writing.pop(key, None)
        if node is not None and not is_done and node.is_attached and node.tier is Tier.DISK:
            self._drop(node)

    def give_up_fetches(self) -> None:
        """Stop waiting for the disk: what is being read is forgotten, with all that follows it."""
        for node in list(self._fetching.values()):
            if node.is_attached:
                self._drop(node)

    def adopt(self, blocks: Sequence[DiskBlock]) -> list[DiskBlock]:
        """Remember blocks that lie on disk already, oldest first; return those that have no place here."""
        waiting: dict[bytes, list[DiskBlock]] = {}
        for block in blocks[-self._limits.num_disk_blocks :] if self._limits.num_disk_blocks else ():
            waiting.setdefault(block.parent_key, []).append(block)
        adopted: set[bytes] = set()
        for salt in {block.salt for block in blocks}:
            root = PrefixNode.root(self._identity, salt, self._clock)
            self._adopt_below(self._roots.setdefault(salt, root), waiting, adopted)
            self._drop_root_if_empty(salt)
        return [block for block in blocks if block.key not in adopted]

    def take_slots(self, count: int) -> list[HostSlot] | None:
        """Give a preempted sequence slots of the host tier, evicting from it; None if it has too few."""
        if count > self.slots.num_slots - self.slots.num_swapped:
            return None
        taken: list[HostSlot] = []
        while len(taken) < count and self._has_slot():
            taken.append(self.slots.take_for_sequence())
        if len(taken) < count:
            self.slots.free_of_sequence(taken)
            return None
        return taken

    def add_moves(self, moves: Sequence[StoreToHost]) -> None:
        """Add a preempted sequence's moves to the tree's: all happen in the order in which they were decided."""
        self._moves.extend(moves)

    def take_moves(self) -> list[Move]:
        """Return what must be moved now, in order."""
        moves, self._moves = self._moves, []
        return moves

    def take_changes(self) -> list[BlockChange]:
        """Return what came and went since the last call, in order; nothing unless the tree was told to log."""
        changes = self._changes or []
        if changes:
            self._changes = []
        return changes

    def usage(self, block_bytes: int) -> tuple[TierUsage, ...]:
        """Return the state of each tier that there is."""
        limits = self._limits
        sizes = {
            Tier.DEVICE: (self.num_blocks, self._pool.num_blocks),
            Tier.HOST: (self.slots.num_used, limits.num_host_slots),
            Tier.DISK: (self._counts.nodes[Tier.DISK], limits.num_disk_blocks),
        }
        return tuple(self._counts.usage(tier, *size, block_bytes) for tier, size in sizes.items() if size[1])

    def check_integrity(self) -> None:
        """Prove that counts, links and tiers agree.

        Raises:
            RuntimeError: a node is lost, a block is remembered twice, or a tier rises along a path.
        """
        nodes = list(self._nodes())
        check_nodes(nodes, self._counts.nodes, self._limits.num_disk_blocks)
        self.slots.check_integrity([node.slot for node in nodes if node.slot is not None])

    @property
    def _total(self) -> int:
        return sum(self._counts.nodes.values())

    def _edges(self, token_ids: Sequence[int]) -> Iterator[Edge]:
        size = self._block_size
        for start in range(0, len(token_ids) - size + 1, size):
            yield tuple(token_ids[start : start + size])

    def _nodes(self) -> Iterator[PrefixNode]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def _is_held(self, node: PrefixNode) -> bool:
        return node.is_fetching or (node.block_id is not None and self._pool.is_held(node.block_id))

    def _leave_device(self, leaf: PrefixNode) -> None:
        if not self._has_slot():
            self._drop(leaf)
            return
        block_id = leaf.block_id
        assert block_id is not None
        leaf.slot = self.slots.take_for_tree()
        self._moves.append(StoreToHost(block_id, leaf.slot))
        leaf.block_id = None
        self._pool.forget(block_id)
        self._sink(leaf, Tier.HOST)

    def _leave_host(self, leaf: PrefixNode) -> None:
        if not self._has_disk_room():
            self._drop(leaf)
            return
        assert leaf.slot is not None
        self._num_disk_jobs += 1
        self._writing[leaf.key] = leaf
        self._moves.append(StoreToDisk(leaf.slot, leaf.disk_block()))
        self.slots.free_of_tree(leaf.slot)
        leaf.slot = None
        self._sink(leaf, Tier.DISK)

    def _sink(self, leaf: PrefixNode, tier: Tier) -> None:
        self._change_tier(leaf, tier)
        assert leaf.parent is not None
        self._leaves.push(leaf, self._total)
        self._leaves.push(leaf.parent, self._total)

    def _has_slot(self) -> bool:
        """Make sure of a free host slot, if need be by letting the oldest leaf of the host tier go."""
        if self.slots.num_free == 0 and self._counts.nodes[Tier.HOST]:
            self._leaves.evict(Tier.HOST, 1, self._is_held, self._leave_host)
        return self.slots.num_free > 0

    def _has_disk_room(self) -> bool:
        limit = self._limits.num_disk_blocks
        if self._num_disk_jobs >= self._limits.max_disk_jobs or limit == 0:
            return False
        if self._counts.nodes[Tier.DISK] >= limit:
            self._leaves.evict(Tier.DISK, 1, self._is_held, self._drop)
        return self._counts.nodes[Tier.DISK] < limit

    def _change_tier(self, node: PrefixNode, tier: Tier) -> None:
        self._log(node, is_stored=False)
        self._counts.nodes[node.tier] -= 1
        node.move_to(tier)
        self._counts.nodes[tier] += 1
        self._log(node, is_stored=True)

    def _let_go(self, node: PrefixNode) -> None:
        """Give up what a node has in its tier."""
        match node.tier:
            case Tier.DEVICE:
                assert node.block_id is not None
                self._pool.forget(node.block_id)
                node.block_id = None
            case Tier.HOST:
                assert node.slot is not None
                self.slots.free_of_tree(node.slot)
                node.slot = None
                node.is_fetching = False
                self._fetching.pop(node.key, None)
            case Tier.DISK:
                self._moves.append(DropFromDisk(node.key))

    def _drop(self, node: PrefixNode) -> None:
        """Forget a node and all that follows it, leaves first."""
        parent = node.parent
        assert parent is not None
        stack, doomed = [node], []
        while stack:
            doomed.append(stack.pop())
            stack.extend(doomed[-1].children.values())
        for each in reversed(doomed):
            self._let_go(each)
            self._log(each, is_stored=False)
            self._counts.nodes[each.tier] -= 1
            each.detach()
        if parent.parent is not None:
            self._leaves.push(parent, self._total)
        else:
            self._drop_root_if_empty(parent.salt)

    def _adopt_below(self, root: PrefixNode, waiting: dict[bytes, list[DiskBlock]], adopted: set[bytes]) -> None:
        stack = [root]
        while stack:
            node = stack.pop()
            for block in waiting.pop(node.key, []):
                if block.token_ids in node.children:
                    continue
                child = node.add_child(block.token_ids, self._clock)
                if child.key != block.key:  # a header that was made up
                    child.detach()
                    continue
                self._counts.nodes[Tier.DISK] += 1
                child.move_to(Tier.DISK)
                self._log(child, is_stored=True)
                adopted.add(block.key)
                self._leaves.push(child, self._total)
                stack.append(child)

    def _log(self, node: PrefixNode, is_stored: bool) -> None:
        if self._changes is not None:
            assert node.parent is not None
            parent_key = node.parent.key if node.parent.parent is not None else None
            self._changes.append(BlockChange(node.tier, is_stored, node.key, parent_key, node.edge))

    def _drop_root_if_empty(self, salt: str) -> None:
        if not self._roots[salt].children:
            del self._roots[salt]
