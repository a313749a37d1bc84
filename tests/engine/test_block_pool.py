"""BlockPool: every block has one state, whatever the order of operations."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.engine.block_pool import BlockId, BlockPool
from pdserve.engine.errors import NoFreeBlocks


def test_freed_block_is_reused_oldest_first() -> None:
    pool = BlockPool(4)
    first = pool.allocate(2)
    pool.allocate(2)

    pool.release([first[1]])
    pool.release([first[0]])

    assert pool.allocate(2) == [first[1], first[0]]


def test_allocation_that_fails_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(2)

    with pytest.raises(NoFreeBlocks):
        pool.allocate(2)

    assert pool.num_free == 1
    pool.check_integrity()


def test_shared_block_is_freed_by_its_last_holder() -> None:
    pool = BlockPool(1)
    block_ids = pool.allocate(1)
    pool.share(block_ids)

    pool.release(block_ids)
    assert pool.num_free == 0
    pool.release(block_ids)

    assert pool.num_free == 1


def test_block_in_flight_and_in_use_counts_as_in_use() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    pool.share(block_ids)
    pool.move_to_transfer(block_ids)

    assert (pool.usage().in_use, pool.usage().in_flight) == (1, 0)
    pool.release(block_ids)
    assert (pool.usage().in_use, pool.usage().in_flight) == (0, 1)
    pool.release_transfer(block_ids)
    assert pool.usage().free == 2


def test_releasing_a_free_block_is_a_broken_invariant() -> None:
    pool = BlockPool(1)
    block_ids = pool.allocate(1)
    pool.release(block_ids)

    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block_ids)


class PoolMachine(RuleBasedStateMachine):
    """Random holders against a plain model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.sequence_holds: list[BlockId] = []
        self.transfer_holds: list[BlockId] = []
        self.cached: set[BlockId] = set()

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            self.sequence_holds.extend(self.pool.allocate(count))

    @precondition(lambda self: self.sequence_holds)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.sequence_holds))
        self.pool.share([block_id])
        self.sequence_holds.append(block_id)

    @precondition(lambda self: self.sequence_holds)
    @rule(data=st.data(), move=st.booleans())
    def end_sequence_hold(self, data: st.DataObject, move: bool) -> None:
        block_id = data.draw(st.sampled_from(self.sequence_holds))
        self.sequence_holds.remove(block_id)
        if move:
            self.pool.move_to_transfer([block_id])
            self.transfer_holds.append(block_id)
        else:
            self.pool.release([block_id])

    @precondition(lambda self: self.transfer_holds)
    @rule(data=st.data(), move=st.booleans())
    def end_transfer_hold(self, data: st.DataObject, move: bool) -> None:
        block_id = data.draw(st.sampled_from(self.transfer_holds))
        self.transfer_holds.remove(block_id)
        if move:
            self.pool.move_to_sequence([block_id])
            self.sequence_holds.append(block_id)
        else:
            self.pool.release_transfer([block_id])

    @precondition(lambda self: set(self.sequence_holds) - self.cached)
    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(set(self.sequence_holds) - self.cached)))
        self.pool.remember(block_id)
        self.cached.add(block_id)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.forget(block_id)
        self.cached.remove(block_id)

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        self.pool.check_integrity()
        in_use = set(self.sequence_holds)
        in_flight = set(self.transfer_holds) - in_use
        cached = self.cached - in_use - in_flight
        usage = self.pool.usage()
        assert (usage.in_use, usage.in_flight, usage.cached) == (len(in_use), len(in_flight), len(cached))
        assert usage.free + usage.cached + usage.in_use + usage.in_flight == usage.total


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
