"""Blocks that lie next to each other leave as one buffer."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.block_pool import BlockId
from pdserve.engine.kv_cache import adjacent_runs


def test_runs_are_cut_where_ids_are_not_successive() -> None:
    table = [BlockId(number) for number in (7, 8, 9, 3, 2, 4, 5)]

    assert list(adjacent_runs(table, 0, 7)) == [(0, 3), (3, 4), (4, 5), (5, 7)]
    assert list(adjacent_runs(table, 1, 4)) == [(1, 3), (3, 4)]
    assert list(adjacent_runs(table, 2, 2)) == []


@given(st.lists(st.integers(0, 6), max_size=12), st.data())
def test_runs_cover_every_index_once_and_are_adjacent(ids: list[int], data: st.DataObject) -> None:
    table = [BlockId(number) for number in ids]
    start = data.draw(st.integers(0, len(table)))
    end = data.draw(st.integers(start, len(table)))

    runs = list(adjacent_runs(table, start, end))

    assert [index for first, stop in runs for index in range(first, stop)] == list(range(start, end))
    for first, stop in runs:
        assert [table[index] for index in range(first, stop)] == list(range(table[first], table[first] + stop - first))
