"""The decisions about tiers, without any memory: random use with pretended copies, some of which fail."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.block_pool import BlockId, BlockPool
from pdserve.engine.block_return import BlockReturn
from pdserve.engine.prefix_tree import PrefixTree
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduler import Scheduler, SchedulerConfig
from pdserve.engine.sequence import Sequence, SequenceSpec
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.engine.step_output import SampledToken
from pdserve.engine.swap_rule import PreemptionMode, SwapRule
from pdserve.engine.tier_moves import (
    DropFromDisk,
    HostSlot,
    LoadFromDisk,
    LoadFromHost,
    StoreToDisk,
    StoreToHost,
    Tier,
    TierLimits,
)

_SIZE = 2

Content = tuple[str, tuple[int, ...]]  # salt and all tokens up to the block's last


class _Memory:
    """What lies where, moved as the tree decides; reads from disk stay under way until `finish_reads`."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.device: dict[BlockId, Content] = {}
        self.host: dict[HostSlot, Content] = {}
        self.disk: dict[bytes, Content] = {}
        self.reads: list[tuple[bytes, Content]] = []
        self.writes: list[bytes] = []

    def move(self) -> None:
        for move in self.tree.take_moves():
            match move:
                case StoreToHost(block_id, slot):
                    self.host[slot] = self.device[block_id]
                case StoreToDisk(slot, block):
                    self.disk[block.key] = self.host[slot]
                    self.writes.append(block.key)
                case LoadFromDisk(key, _):
                    self.reads.append((key, self.disk.pop(key)))
                case DropFromDisk(key):
                    del self.disk[key]

    def load(self, loads: tuple[LoadFromHost, ...], num_sound: int) -> int:
        num_sound = min(num_sound, len(loads))
        for load in loads[:num_sound]:
            self.device[load.block_id] = self.host[load.slot]
        return num_sound

    def finish_reads(self, is_sound: bool) -> None:
        for key, content in self.reads:
            slot = self.tree.fetched(key, is_sound)
            if slot is not None:
                self.host[slot] = content
        for key in self.writes:
            self.tree.written(key, is_done=True)
        self.reads, self.writes = [], []
        self.move()


_tokens = st.lists(st.integers(0, 2), max_size=10)
_steps = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "hold", "evict", "evict", "drop", "return", "return", "read", "spoil"]),
        _tokens,
        st.sampled_from("ab"),
        st.integers(0, 5),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(_steps, st.integers(0, 5), st.integers(0, 6), st.integers(1, 4))
def test_random_use_of_all_tiers_finds_only_what_was_inserted(
    steps: list[tuple[str, list[int], str, int]], num_slots: int, num_disk: int, max_jobs: int
) -> None:
    """C135: no tier ever gives one prompt the blocks of another."""
    pool = BlockPool(10)
    tree = PrefixTree(pool, _SIZE, TierLimits(num_slots, num_disk if num_slots else 0, max_jobs), logs=True)
    blocks = SequenceBlocks(pool, tree, _SIZE)
    returns, memory = BlockReturn(blocks), _Memory(tree)
    held: list[list[BlockId]] = []
    for action, tokens, salt, number in steps:
        match action:
            case "insert" | "hold":
                cached = tree.match(tokens, salt)
                table = blocks.reserve(cached, len(tokens) // _SIZE)
                memory.move()
                if table is not None:
                    for index, block_id in enumerate(table):
                        memory.device[block_id] = (salt, tuple(tokens[: (index + 1) * _SIZE]))
                    tree.insert(tokens, table, salt)
                    held.append(table)
                if table is not None and action == "insert":
                    pool.release(held.pop())
            case "drop":
                if held:
                    pool.release(held.pop())
            case "evict":
                tree.evict(number)
            case "return":
                _bring_back(returns, memory, tokens, salt, number)
            case "read" | "spoil":
                memory.finish_reads(is_sound=action == "read")
        memory.move()
        pool.check_integrity()
        tree.check_integrity()
        _check_contents(memory)
    for table in held:
        pool.release(table)
    memory.finish_reads(is_sound=True)
    tree.clear()
    memory.move()
    assert (pool.num_free, tree.slots.num_free, memory.disk) == (10, num_slots, {})
    _check_changes(tree)


def _bring_back(returns: BlockReturn, memory: _Memory, tokens: list[int], salt: str, num_sound: int) -> None:
    if len(tokens) < 2:
        return
    sequence = Sequence(SequenceSpec("a", tuple(tokens), SamplingParams(), salt=salt))
    plan = returns.plan_restore(sequence, 1)
    memory.move()
    if plan is not None:
        returns.finish_restore(plan, memory.load(plan.loads, num_sound))
    returns.start_fetch(sequence, 1)


def _check_contents(memory: _Memory) -> None:
    reading = {key for key, _ in memory.reads}
    for node in memory.tree._nodes():
        tokens: tuple[int, ...] = ()
        above = node
        while above.parent is not None:
            tokens = above.edge + tokens
            above = above.parent
        expected = (node.salt, tokens)
        if node.block_id is not None:
            assert memory.device[node.block_id] == expected
        elif node.is_fetching:
            assert node.key in reading
        elif node.slot is not None:
            assert memory.host[node.slot] == expected
        else:
            assert memory.disk[node.key] == expected


def _check_changes(tree: PrefixTree) -> None:
    """Whoever follows the log knows what each tier holds: here, nothing."""
    present: set[tuple[Tier, bytes]] = set()
    for change in tree.take_changes():
        entry = (change.tier, change.key)
        assert (entry in present) != change.is_stored
        present ^= {entry}
    assert present == set()


_requests = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(0, 2)), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    _requests,
    st.integers(6, 10),
    st.integers(0, 12),
    st.sampled_from([PreemptionMode.SWAP, PreemptionMode.AUTO, PreemptionMode.RECOMPUTE]),
    st.booleans(),
    st.integers(0, 3),
)
def test_every_request_finishes_with_tiers_and_swaps_that_may_fail(
    requests: list[tuple[int, int, int]],
    num_blocks: int,
    num_slots: int,
    mode: PreemptionMode,
    has_prefix_cache: bool,
    num_sound: int,
) -> None:
    pool = BlockPool(num_blocks)
    tree = PrefixTree(pool, 4, TierLimits(num_slots, 4 if num_slots else 0))
    scheduler = Scheduler(SchedulerConfig(4, 5, 64, has_prefix_cache), pool, tree, 4, frozenset())
    scheduler.blocks.swap_rule = SwapRule(mode)
    returns, memory = BlockReturn(scheduler.blocks), _Memory(tree)
    for number, (num_prompt, max_tokens, first) in enumerate(requests):
        prompt = tuple(range(first, first + num_prompt))
        scheduler.add(SequenceSpec(str(number), prompt, SamplingParams(max_tokens=max_tokens, seed=0)))
    memory.device = {BlockId(index): ("", ()) for index in range(num_blocks)}
    positions: dict[str, list[int]] = {str(number): [] for number in range(len(requests))}

    for _ in range(3000):
        if not scheduler.has_work:
            break
        num_promised = 0
        for sequence, needed in scheduler.next_admissions():
            plan = returns.plan_restore(sequence, needed + num_promised)
            memory.move()
            if plan is not None:
                returns.finish_restore(plan, memory.load(plan.loads, num_sound))
            returns.start_fetch(sequence, needed + num_promised)
            resume = returns.plan_resume(sequence, needed + num_promised)
            memory.move()
            if resume is not None:
                returns.finish_resume(resume, memory.load(resume.loads, num_sound))
            num_promised += needed
        batch = scheduler.schedule()
        memory.move()
        sampled = [SampledToken(9) if span.sampling is not None else None for span in batch.spans]
        for output in scheduler.update(batch, sampled):
            positions[output.seq_id] += [output.output_position] if output.token else []
        memory.finish_reads(is_sound=num_sound > 0)
        scheduler.check_integrity()

    for number, (_, max_tokens, _) in enumerate(requests):
        assert positions[str(number)] == list(range(max_tokens))
    usage = pool.usage()
    assert usage.free + usage.cached == usage.total
    assert tree.slots.num_swapped == 0


def test_swap_is_taken_when_the_copy_is_estimated_cheaper() -> None:
    slow_copy = SwapRule(block_bytes=1000, prefill_tokens_per_s=100.0, copy_bytes_per_s=1e4)
    fast_copy = SwapRule(block_bytes=1000, prefill_tokens_per_s=100.0, copy_bytes_per_s=1e5)

    # 16 tokens in 1 block: 0.16 s to compute, 0.2 s or 0.02 s to copy out and back
    assert not slow_copy.prefers_swap(16, 1)
    assert fast_copy.prefers_swap(16, 1)
    assert SwapRule(block_bytes=1000).prefers_swap(16, 1)
    assert SwapRule(PreemptionMode.SWAP, 1000, 100.0, 1e4).prefers_swap(16, 1)
    assert not SwapRule(PreemptionMode.RECOMPUTE, 1000, 100.0, 1e5).prefers_swap(16, 1)
