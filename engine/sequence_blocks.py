"""How sequences come by blocks and let them go: matched in the prefix tree, allocated, remembered, released. Pure."""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from pdserve.engine.block_pool import BlockId, BlockPool
from pdserve.engine.prefix_tree import PrefixTree
from pdserve.engine.scheduled_batch import BlockCopy
from pdserve.engine.sequence import Sequence, SequenceStatus, SwappedBlocks
from pdserve.engine.swap_rule import SwapRule
from pdserve.engine.tier_moves import StoreToHost


class SequenceBlocks:
    """The block pool and the prefix tree as a scheduler uses them: evicts what is only cached when room is needed."""

    def __init__(self, pool: BlockPool, tree: PrefixTree, block_size: int, enable_prefix_cache: bool = True) -> None:
        self.tree = tree
        self._enable_prefix_cache = enable_prefix_cache
        self.pool = pool
        self.block_size = block_size
        self.swap_rule = SwapRule()
        self.num_swaps = 0

    def num_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, token_ids: SequenceOf[int], salt: str) -> list[BlockId]:
        """Return the cached blocks that `token_ids` starts with; `reserve` must hold them before anything else."""
        return self.tree.match(token_ids, salt)

    def reserve(self, cached: list[BlockId], num_blocks: int, growth: int = 0) -> list[BlockId] | None:
        """Hold `cached` and as many new blocks as make `num_blocks`, if there is room for `growth` more; else None."""
        self.pool.share(cached)
        num_new = num_blocks - len(cached)
        usage = self.pool.usage()  # what is only cached is room too, but not evicted for the sake of growth to come
        block_ids = self.allocate(num_new) if usage.free + usage.cached >= num_new + growth else None
        if block_ids is None:
            self.pool.release(cached)
            return None
        return cached + block_ids

    def allocate(self, num_blocks: int) -> list[BlockId] | None:
        """Return new blocks, each held once, or None if there is no room for all of them."""
        return self.pool.allocate(num_blocks) if self._make_room(num_blocks) else None

    def has_own_place(self, sequence: Sequence) -> bool:
        """Whether the next token of `sequence` can be written as its table is: `extend` would change nothing."""
        table, index = sequence.block_table, sequence.num_computed_tokens // self.block_size
        return index < len(table) and not self.pool.is_shared(table[index])

    def extend(self, sequence: Sequence, num_new: int, copies: list[BlockCopy]) -> bool:
        """Make room for the next `num_new` tokens of `sequence`, in blocks that nobody else holds.

        A shared block that is to be written into is replaced by a new one, and the copy is added to `copies`; whoever
        is left as the last holder writes in place. Return whether there was room for all of it; else nothing changed.
        """
        table, start = sequence.block_table, sequence.num_computed_tokens
        first = start // self.block_size
        must_copy = first < len(table) and self.pool.is_shared(table[first])
        num_more = max(0, self.num_for(start + num_new) - len(table))
        block_ids = self.allocate(num_more + must_copy)
        if block_ids is None:
            return False
        if must_copy:
            source, table[first] = table[first], block_ids.pop()
            if start % self.block_size:
                copies.append(BlockCopy(source, table[first]))
            self.pool.release([source])
        table.extend(block_ids)
        return True

    def reach(self, sequence: Sequence, num_tokens: int) -> int:
        """Let a table hold `num_tokens` tokens if there is room; return how many of them it can hold now."""
        table = sequence.block_table
        needed = self.num_for(num_tokens) - len(table)
        if needed > 0 and (block_ids := self.allocate(needed)) is not None:
            table.extend(block_ids)
        return min(num_tokens, len(table) * self.block_size)

    def trim(self, sequence: Sequence) -> None:
        """Release the blocks at the end of a table in which none of the sequence's tokens belongs."""
        num_blocks = self.num_for(sequence.num_tokens)
        self.pool.release(sequence.block_table[num_blocks:])
        del sequence.block_table[num_blocks:]

    def remember_full(self, sequence: Sequence) -> None:
        """Insert blocks that have become full into the prefix tree; the last token's block may still be partial."""
        num_full = sequence.num_computed_tokens // self.block_size
        if self._enable_prefix_cache and num_full * self.block_size > sequence.num_inserted_tokens:
            end = num_full * self.block_size
            self.tree.insert(sequence.token_ids[:end], sequence.block_table[:num_full], sequence.spec.salt)
            sequence.num_inserted_tokens = end

    def note_cached(self, sequence: Sequence, num_tokens: int) -> None:
        """Count the prompt tokens that this admission spares, those aside that were computed before a preemption."""
        num_before = min(sequence.num_reached_tokens, sequence.num_prompt_tokens)
        num_now = min(num_tokens, sequence.num_prompt_tokens)
        sequence.num_cached_tokens = (sequence.num_cached_tokens or 0) + max(0, num_now - num_before)

    def preempt(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence; what the tree does not know may be kept in host memory (see `SwapRule`)."""
        sequence.num_reached_tokens = max(sequence.num_reached_tokens, sequence.num_computed_tokens)
        if not sequence.is_prompt_scored:  # its scores are computed again, with all the prompt
            self._swap_out(sequence)
        self.release(sequence, keeps_swap=True)
        sequence.num_computed_tokens = sequence.num_inserted_tokens = 0
        sequence.prompt_scores.clear()

    def release(self, sequence: Sequence, *, keeps_swap: bool = False) -> None:
        """Let go of all blocks of a sequence, whoever holds them for it."""
        if sequence.swapped is not None and not keeps_swap:
            self.forget_swapped(sequence)
        if sequence.status in (SequenceStatus.IMPORTING, SequenceStatus.EXPORTING):
            self.pool.release_transfer(sequence.block_table)
        else:
            self.pool.release(sequence.block_table)
        sequence.block_table = []

    def forget_swapped(self, sequence: Sequence) -> None:
        """Give up what a preempted sequence keeps in host memory."""
        assert sequence.swapped is not None
        self.tree.slots.free_of_sequence(sequence.swapped.slots)
        sequence.swapped = None

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Prove that the blocks in the tables of all `sequences` are those that the pool counts as held.

        Raises:
            RuntimeError: a block leaked, is owned twice, or belongs to nobody.
        """
        self.pool.check_integrity()
        self.tree.check_integrity()
        held = {block_id for sequence in sequences for block_id in sequence.block_table}
        usage = self.pool.usage()
        if len(held) != usage.in_use + usage.in_flight:
            raise RuntimeError(f"scheduler: {len(held)} blocks in tables, {usage} in the pool")
        num_swapped = sum(len(sequence.swapped.slots) for sequence in sequences if sequence.swapped is not None)
        if num_swapped != self.tree.slots.num_swapped:
            raise RuntimeError(f"scheduler: {num_swapped} slots of sequences, {self.tree.slots.num_swapped} counted")

    def _swap_out(self, sequence: Sequence) -> None:
        first = sequence.num_inserted_tokens // self.block_size
        num_blocks = self.num_for(sequence.num_computed_tokens) - first
        num_tokens = sequence.num_computed_tokens - first * self.block_size
        if num_blocks == 0 or not self.tree.slots.num_slots or not self.swap_rule.prefers_swap(num_tokens, num_blocks):
            return
        slots = self.tree.take_slots(num_blocks)
        if slots is None:
            return
        block_ids = sequence.block_table[first : first + num_blocks]
        self.tree.add_moves([StoreToHost(block, slot) for block, slot in zip(block_ids, slots, strict=True)])
        sequence.swapped = SwappedBlocks(first, tuple(slots), sequence.num_computed_tokens)
        self.num_swaps += 1

    def _make_room(self, num_blocks: int) -> bool:
        if self.pool.num_free < num_blocks:
            self.tree.evict(num_blocks - self.pool.num_free)
        return self.pool.num_free >= num_blocks
