"""PrefixTree: what it finds is what was inserted under the same salt; eviction takes unheld leaves, oldest first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.block_pool import BlockId, BlockPool
from pdserve.engine.prefix_tree import PrefixTree

_BLOCK_SIZE = 2


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(16)


@pytest.fixture
def tree(pool: BlockPool) -> PrefixTree:
    return PrefixTree(pool, _BLOCK_SIZE)


def _remember(tree: PrefixTree, pool: BlockPool, tokens: list[int], salt: str = "") -> list[BlockId]:
    block_ids = pool.allocate(len(tokens) // _BLOCK_SIZE)
    tree.insert(tokens, block_ids, salt)
    pool.release(block_ids)
    return block_ids


def test_match_returns_the_longest_run_of_full_blocks(pool: BlockPool, tree: PrefixTree) -> None:
    block_ids = _remember(tree, pool, [1, 2, 3, 4, 5, 6])

    assert tree.match([1, 2, 3, 4, 9, 9], "") == block_ids[:2]
    assert tree.match([1, 2, 3], "") == block_ids[:1]
    assert tree.match([2, 1], "") == []


def test_another_salt_shares_nothing(pool: BlockPool, tree: PrefixTree) -> None:
    _remember(tree, pool, [1, 2, 3, 4], salt="a")

    assert tree.match([1, 2, 3, 4], "b") == []


def test_duplicate_run_keeps_the_first_block_and_frees_the_second(pool: BlockPool, tree: PrefixTree) -> None:
    first = _remember(tree, pool, [1, 2])

    _remember(tree, pool, [1, 2])

    assert tree.match([1, 2], "") == first
    assert (pool.usage().cached, pool.usage().free) == (1, 15)


def test_least_recently_used_leaf_goes_first(pool: BlockPool, tree: PrefixTree) -> None:
    _remember(tree, pool, [1, 2])
    _remember(tree, pool, [3, 4])
    tree.match([1, 2], "")

    assert tree.evict(1) == 1

    assert tree.match([1, 2], "") != []
    assert tree.match([3, 4], "") == []


def test_parent_is_evicted_only_after_its_children(pool: BlockPool, tree: PrefixTree) -> None:
    block_ids = _remember(tree, pool, [1, 2, 3, 4, 5, 6])

    tree.evict(2)

    assert tree.match([1, 2, 3, 4, 5, 6], "") == block_ids[:1]


def test_held_blocks_are_never_evicted(pool: BlockPool, tree: PrefixTree) -> None:
    _remember(tree, pool, [1, 2, 3, 4])
    held = tree.match([1, 2], "")
    pool.share(held)

    assert tree.evict(2) == 1
    pool.release(held)
    assert tree.evict(2) == 1
    assert pool.num_free == 16


_tokens = st.lists(st.integers(0, 2), max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["insert", "match", "evict", "hold", "drop"]), _tokens, st.sampled_from("ab")))
)
def test_random_use_finds_only_what_was_inserted(steps: list[tuple[str, list[int], str]]) -> None:
    pool = BlockPool(12)
    tree = PrefixTree(pool, _BLOCK_SIZE)
    content: dict[BlockId, tuple[str, tuple[int, ...]]] = {}
    held: list[list[BlockId]] = []
    for action, tokens, salt in steps:
        if action == "insert" and len(tokens) // _BLOCK_SIZE <= pool.num_free:
            cached = tree.match(tokens, salt)
            pool.share(cached)
            block_ids = cached + pool.allocate(len(tokens) // _BLOCK_SIZE - len(cached))
            for index, block_id in enumerate(block_ids):
                content[block_id] = (salt, tuple(tokens[: (index + 1) * _BLOCK_SIZE]))
            tree.insert(tokens, block_ids, salt)
            pool.release(block_ids)
        elif action == "evict":
            tree.evict(len(tokens))
        elif action == "drop" and held:
            pool.release(held.pop())
        else:
            found = tree.match(tokens, salt)
            for index, block_id in enumerate(found):
                assert content[block_id] == (salt, tuple(tokens[: (index + 1) * _BLOCK_SIZE]))
            if action == "hold":
                pool.share(found)
                held.append(found)
        pool.check_integrity()
        tree.check_integrity()
    for block_ids in held:
        pool.release(block_ids)
    tree.clear()
    assert pool.num_free == 12
