import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.control.messages import FinishReason, TokenChunk, TokenLogprobs
from pdserve.gateway.errors import ProtocolViolation
from pdserve.gateway.token_merge import TokenMerge


def chunk(start: int, *token_ids: int, finish: FinishReason | None = None, logprobs: bool = False) -> TokenChunk:
    values = tuple(TokenLogprobs(-float(token_id), ()) for token_id in token_ids) if logprobs else None
    return TokenChunk("r:1", start, token_ids, values, finish, None)


def test_chunks_in_order_pass_at_once() -> None:
    merge = TokenMerge(4, has_logprobs=False)

    assert [event.token_ids for event in merge.add(chunk(0, 1))] == [(1,)]
    assert [event.token_ids for event in merge.add(chunk(1, 2, 3))] == [(2, 3)]
    assert merge.token_ids == (1, 2, 3)
    assert not merge.has_gap


def test_an_early_chunk_waits_and_a_late_one_releases_it() -> None:
    merge = TokenMerge(4, has_logprobs=False)

    assert merge.add(chunk(1, 2, finish=FinishReason.STOP)) == ()
    assert merge.has_gap
    events = merge.add(chunk(0, 1))

    assert [(event.start, event.token_ids, event.finish_reason) for event in events] == [
        (0, (1,), None),
        (1, (2,), FinishReason.STOP),
    ]
    assert merge.is_finished and not merge.has_gap


def test_an_overlap_is_said_once_with_its_own_logprobs() -> None:
    merge = TokenMerge(5, has_logprobs=True)
    merge.add(chunk(0, 1, 2, logprobs=True))

    (event,) = merge.add(chunk(1, 2, 3, logprobs=True))

    assert (event.start, event.token_ids) == (2, (3,))
    assert event.logprobs == (TokenLogprobs(-3.0, ()),)


def test_an_end_without_a_token_is_an_event() -> None:
    merge = TokenMerge(5, has_logprobs=False)
    merge.add(chunk(0, 1))

    (event,) = merge.add(chunk(1, finish=FinishReason.STOP))

    assert (event.token_ids, event.finish_reason) == ((), FinishReason.STOP)
    assert merge.add(chunk(1, 9)) == ()


def test_logprobs_of_the_prompt_come_with_the_first_token_once() -> None:
    merge = TokenMerge(5, has_logprobs=False, num_prompt_logprobs=2)
    scores = (TokenLogprobs(-1.0, ()), TokenLogprobs(-2.0, ()))

    merge.add(chunk(1, 8))
    first, second = merge.add(chunk(0, 7)._replace(prompt_logprobs=scores))

    assert first.prompt_logprobs == scores and second.prompt_logprobs is None


@pytest.mark.parametrize("scores", [None, (), (TokenLogprobs(-1.0, ()),)])
def test_a_first_token_without_the_logprobs_of_the_prompt_is_a_violation(
    scores: tuple[TokenLogprobs, ...] | None,
) -> None:
    merge = TokenMerge(5, has_logprobs=False, num_prompt_logprobs=2)

    with pytest.raises(ProtocolViolation):
        merge.add(chunk(0, 7)._replace(prompt_logprobs=scores))


def test_a_new_attempt_forgets_what_the_old_one_said_early() -> None:
    merge = TokenMerge(5, has_logprobs=False)
    merge.add(chunk(0, 1))
    merge.add(chunk(3, 4))

    merge.restart()

    assert not merge.has_gap
    assert merge.token_ids == (1,)


@pytest.mark.parametrize(
    ("bad", "has_logprobs"),
    [
        (chunk(3, 1, 2), False),
        (chunk(2**40, 1), False),
        (chunk(1, 2), True),
        (TokenChunk("r:1", 1, (1, 2), (TokenLogprobs(0.0, ()),), None, None), True),
        (chunk(0, finish=FinishReason.STOP), False),
    ],
)
def test_what_cannot_belong_is_a_violation(bad: TokenChunk, has_logprobs: bool) -> None:
    merge = TokenMerge(4, has_logprobs=has_logprobs)
    merge.add(chunk(0, 1, logprobs=has_logprobs))

    with pytest.raises(ProtocolViolation):
        merge.add(bad)

    assert merge.token_ids == (1,)


@st.composite
def shuffled_attempts(draw: st.DrawFn) -> tuple[int, list[TokenChunk]]:
    """Chunks that cover [0, n) in any order, with overlaps and repeats, the end somewhere among them."""
    num_tokens = draw(st.integers(1, 30))
    bounds = sorted({0, num_tokens, *draw(st.lists(st.integers(0, num_tokens), max_size=10))})
    pieces = list(itertools.pairwise(bounds))
    for _ in range(draw(st.integers(0, 5))):
        first = draw(st.integers(0, num_tokens - 1))
        pieces.append((first, draw(st.integers(first, num_tokens))))
    chunks = [
        chunk(
            first,
            *range(100 + first, 100 + last),
            finish=FinishReason.LENGTH if last == num_tokens else None,
            logprobs=True,
        )
        for first, last in pieces
    ]
    return num_tokens, draw(st.permutations(chunks))


@given(shuffled_attempts())
def test_any_order_of_any_pieces_is_the_same_output(case: tuple[int, list[TokenChunk]]) -> None:
    num_tokens, chunks = case
    merge = TokenMerge(num_tokens, has_logprobs=True)
    events = [event for piece in chunks for event in merge.add(piece)]

    assert [token_id for event in events for token_id in event.token_ids] == list(range(100, 100 + num_tokens))
    position = 0
    for event in events:
        assert event.start == position
        assert event.logprobs == tuple(TokenLogprobs(-float(token_id), ()) for token_id in event.token_ids)
        position += len(event.token_ids)
    assert [event.finish_reason for event in events if event.finish_reason] == [FinishReason.LENGTH]
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert merge.is_finished and not merge.has_gap
