"""Blocks on their way back to the device, before the sequence that wants them is admitted. Pure: plans and results.

Everything here happens between two steps: a plan is made, a mover performs it, the result is told. A block enters the
prefix tree, or a sequence's table, only after its check has passed.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from pdserve.engine.block_pool import BlockId
from pdserve.engine.prefix_node import PrefixNode
from pdserve.engine.sequence import Sequence, SequenceStatus
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.engine.tier_moves import HostSlot, LoadFromHost, Tier


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Blocks of the tree that come back from the host tier; `held` are those on the device that they follow."""

    nodes: tuple[PrefixNode, ...]
    loads: tuple[LoadFromHost, ...]
    held: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """A preempted sequence's own blocks that come back into the table reserved for it."""

    sequence: Sequence
    table: tuple[BlockId, ...]
    loads: tuple[LoadFromHost, ...]


class BlockReturn:
    """Plans what comes back for a sequence. Between a plan and its result nothing else may be asked of the blocks."""

    def __init__(self, blocks: SequenceBlocks) -> None:
        self._blocks = blocks
        self._tree = blocks.tree
        self._pool = blocks.pool

    def plan_restore(self, sequence: Sequence, num_blocks: int) -> RestorePlan | None:
        """Plan to bring back what the host tier has of a sequence; None where there is nothing, or no room."""
        if sequence.is_prompt_scored:
            return None
        run = _run(sequence)
        if not sequence.is_looked_up:
            sequence.is_looked_up = True
            self._tree.count_lookup(run, sequence.spec.salt)
        if not self._tree.slots.num_slots:
            return None
        path = self._tree.touch(run, sequence.spec.salt)
        on_device = [node.block_id for node in path if node.block_id is not None]
        if len(on_device) == len(path) or not self._fits(num_blocks, on_device):
            return None
        return self._plan(path[len(on_device) :], on_device)

    def start_fetch(self, sequence: Sequence, num_blocks: int) -> None:
        """Begin to read what comes next of a sequence and is on disk; the sequence then waits (`is_fetching`).

        After its restore, which makes room in the host tier.
        """
        is_idle = sequence.is_prompt_scored or not self._tree.slots.num_slots
        path = [] if is_idle else self._tree.touch(_run(sequence), sequence.spec.salt)
        on_device = [node.block_id for node in path if node.block_id is not None]
        if len(on_device) < len(path) and self._fits(num_blocks, on_device):
            self._tree.fetch(path)
        sequence.is_fetching = any(node.is_fetching for node in path)

    def finish_restore(self, plan: RestorePlan, num_sound: int) -> None:
        """The first `num_sound` loads of a plan passed their check; the next, if any, did not."""
        block_ids = [load.block_id for load in plan.loads]
        for node, block_id in zip(plan.nodes[:num_sound], block_ids, strict=False):
            self._tree.restored(node, block_id)
        if num_sound < len(plan.nodes):
            self._tree.spoiled(plan.nodes[num_sound])
        self._pool.release(block_ids)
        self._pool.release(plan.held)

    def plan_resume(self, sequence: Sequence, num_blocks: int) -> ResumePlan | None:
        """Plan to give a preempted sequence its table back; None where it kept nothing, or there is no room yet.

        If the tree has lost what came before, its own blocks are given up: it is admitted like any other.
        """
        swapped = sequence.swapped
        if swapped is None or sequence.is_fetching:
            return None
        first = swapped.first
        num_own = self._blocks.num_for(sequence.num_tokens)
        cached = self._blocks.match(sequence.token_ids[: first * self._blocks.block_size], sequence.spec.salt)
        if len(cached) < first:
            if self._fits(num_blocks, cached):
                self._blocks.forget_swapped(sequence)
            return None
        table = self._blocks.reserve(cached, num_own, num_blocks - num_own)
        if table is None:
            return None
        loads = tuple(map(LoadFromHost, swapped.slots, table[first:]))
        return ResumePlan(sequence, tuple(table), loads)

    def finish_resume(self, plan: ResumePlan, num_sound: int) -> None:
        """Hand the table over: everything before the first block that failed its check is computed."""
        sequence, size = plan.sequence, self._blocks.block_size
        assert sequence.swapped is not None
        first, num_tokens = sequence.swapped.first, sequence.swapped.num_tokens
        if num_sound < len(plan.loads):
            self._tree.count_corrupt_swap()
            num_tokens = (first + num_sound) * size
        self._blocks.forget_swapped(sequence)
        sequence.block_table = list(plan.table)
        sequence.num_computed_tokens = num_tokens
        sequence.num_inserted_tokens = first * size
        self._blocks.note_cached(sequence, first * size)

    def _plan(self, below: list[PrefixNode], on_device: list[BlockId]) -> RestorePlan | None:
        self._pool.share(on_device)
        block_ids = self._blocks.allocate(len(_ready(below)))
        if not block_ids:
            self._pool.release(on_device)
            return None
        nodes = _ready(below)[: len(block_ids)]  # making room may have taken some of them off the host tier
        self._pool.release(block_ids[len(nodes) :])
        loads = tuple(LoadFromHost(_slot(node), block_id) for node, block_id in zip(nodes, block_ids, strict=False))
        return RestorePlan(tuple(nodes), loads, tuple(on_device))

    def _fits(self, num_blocks: int, on_device: list[BlockId]) -> bool:
        """Whether the sequence can be admitted now: bringing blocks back for one that cannot would be for nothing."""
        usage = self._pool.usage()
        num_shared = sum(1 for block_id in on_device if self._pool.is_held(block_id))
        return num_blocks - num_shared <= usage.free + usage.cached


def _run(sequence: Sequence) -> SequenceOf[int]:
    """Return the tokens whose blocks are of use: a sequence that is computed here needs its last token computed."""
    is_import = sequence.status in (SequenceStatus.PENDING, SequenceStatus.IMPORTING)
    return sequence.token_ids if is_import else sequence.token_ids[:-1]


def _ready(below: list[PrefixNode]) -> list[PrefixNode]:
    nodes = []
    for node in below:
        if node.tier is not Tier.HOST or node.is_fetching or not node.is_attached:
            break
        nodes.append(node)
    return nodes


def _slot(node: PrefixNode) -> HostSlot:
    assert node.slot is not None
    return node.slot
