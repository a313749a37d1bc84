"""Prompt lookup against a search written plainly, over growing sequences."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.drafts import DraftRequest
from pdserve.engine.ngram_drafter import NgramDrafter, NgramIndex
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduled_batch import ScheduledSpan


def _searched(token_ids: Sequence[int], lookup: tuple[int, int], limit: int) -> tuple[int, ...]:
    for size in range(lookup[1], lookup[0] - 1, -1):
        ending = list(token_ids[len(token_ids) - size :])
        for end in range(len(token_ids) - 1, size - 1, -1):
            if list(token_ids[end - size : end]) == ending and size < len(token_ids):
                grown = list(token_ids)
                for index in range(limit):
                    grown.append(grown[end + index])
                return tuple(grown[len(token_ids) :])
    return ()


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    st.integers(1, 6),
    st.integers(1, 5),
)
def test_a_growing_index_finds_what_a_search_finds(
    token_ids: list[int], lookup: tuple[int, int], limit: int, stride: int
) -> None:
    index = NgramIndex(*lookup)

    for length in range(1, len(token_ids) + 1, stride):
        known = token_ids[:length]
        assert index.continuation(known, limit) == _searched(known, lookup, limit)


def test_the_longest_and_then_the_latest_match_wins() -> None:
    assert NgramIndex(1, 3).continuation([1, 2, 3, 4, 9, 3, 5, 2, 3], 2) == (4, 9)
    assert NgramIndex(1, 1).continuation([1, 2, 3, 4, 9, 3, 5, 2, 3], 2) == (5, 2)


def test_nothing_is_kept_for_a_forgotten_sequence() -> None:
    drafter = NgramDrafter(1, 2)
    span = ScheduledSpan("a", 3, (7,), 4, (), SamplingParams(seed=0), 1)

    assert drafter.propose([DraftRequest(span, [7, 8, 9, 7], 3)]).token_ids == ((8, 9, 7),)
    drafter.forget("a")

    assert not drafter.seq_ids
    assert drafter.propose([DraftRequest(span, [1, 2, 3, 4], 3)]).token_ids == ((),)
