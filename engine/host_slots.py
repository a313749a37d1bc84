"""The slots of the host tier and who has them: the prefix tree, a preempted sequence, or nobody. Pure."""

from collections.abc import Iterable

from pdserve.engine.tier_moves import HostSlot


class HostSlots:
    """Owns every host slot: free, of the tree, or of a sequence that was preempted; free + tree + swapped == total."""

    def __init__(self, num_slots: int) -> None:
        self._free = [HostSlot(index) for index in reversed(range(num_slots))]
        self._tree: set[HostSlot] = set()
        self._swapped: set[HostSlot] = set()
        self.num_slots = num_slots

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots that hold a block."""
        return len(self._tree) + len(self._swapped)

    @property
    def num_swapped(self) -> int:
        """Slots of preempted sequences."""
        return len(self._swapped)

    def take_for_tree(self) -> HostSlot:
        """Give a free slot to the tree; there must be one."""
        slot = self._free.pop()
        self._tree.add(slot)
        return slot

    def take_for_sequence(self) -> HostSlot:
        """Give a free slot to a sequence; there must be one."""
        slot = self._free.pop()
        self._swapped.add(slot)
        return slot

    def free_of_tree(self, slot: HostSlot) -> None:
        """The tree lets go of a slot."""
        self._tree.remove(slot)
        self._free.append(slot)

    def free_of_sequence(self, slots: Iterable[HostSlot]) -> None:
        """A sequence lets go of its slots."""
        for slot in slots:
            self._swapped.remove(slot)
            self._free.append(slot)

    def check_integrity(self, tree_slots: list[HostSlot]) -> None:
        """Prove that each slot has exactly one owner, and that the tree's are those it names.

        Raises:
            RuntimeError: a slot leaked or is owned twice.
        """
        owned = [*self._free, *self._tree, *self._swapped]
        if len(owned) != self.num_slots or len(set(owned)) != self.num_slots:
            raise RuntimeError(f"host slots: {len(set(owned))} of {self.num_slots} accounted for")
        if len(tree_slots) != len(self._tree) or set(tree_slots) != self._tree:
            raise RuntimeError(f"host slots: the tree has {sorted(tree_slots)}, counted {sorted(self._tree)}")
