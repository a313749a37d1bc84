"""The one order in which blocks leave a tier: least recently used leaf first. Pure."""

import heapq
from collections.abc import Callable

from pdserve.engine.prefix_node import PrefixNode
from pdserve.engine.tier_moves import Tier


class LeafOrder:
    """A heap for each tier of (last_used, tie, leaf); an entry whose node has changed since is stale and skipped."""

    def __init__(self) -> None:
        self._heaps: dict[Tier, list[tuple[int, int, PrefixNode]]] = {tier: [] for tier in Tier}
        self._ties = 0

    def push(self, node: PrefixNode, num_nodes: int) -> None:
        """Enter a node that may have become a leaf of its tier, or was used; `num_nodes` bounds the stale entries."""
        if not node.is_leaf_of_tier:
            return
        heap = self._heaps[node.tier]
        if len(heap) > 4 * num_nodes + 64:
            heap[:] = [entry for entry in heap if _is_current(entry, node.tier)]
            heapq.heapify(heap)
        self._ties += 1
        heapq.heappush(heap, (node.last_used, self._ties, node))

    def evict(self, tier: Tier, count: int, is_kept: Callable[[PrefixNode], bool], leave: "Leave") -> int:
        """Let up to `count` leaves of a tier leave it, oldest first, but none that is kept; return how many did."""
        heap = self._heaps[tier]
        kept: list[tuple[int, int, PrefixNode]] = []
        num_left = 0
        while num_left < count and heap:
            entry = heapq.heappop(heap)
            if not _is_current(entry, tier):
                continue
            if is_kept(entry[2]):
                kept.append(entry)
                continue
            leave(entry[2])
            num_left += 1
        for entry in kept:
            heapq.heappush(heap, entry)
        return num_left


Leave = Callable[[PrefixNode], None]  # moves the node to another tier or out of the tree


def _is_current(entry: tuple[int, int, PrefixNode], tier: Tier) -> bool:
    last_used, _, node = entry
    return node.is_attached and node.tier is tier and node.is_leaf_of_tier and node.last_used == last_used
