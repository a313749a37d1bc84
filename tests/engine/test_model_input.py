"""ModelInput: a batch laid out, held against one that is laid out position by position."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.block_pool import BlockId
from pdserve.engine.model_input import ModelInput
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduled_batch import ScheduledBatch, ScheduledSpan

_BLOCK_SIZE = 4
_SAMPLING = SamplingParams(seed=0)


@st.composite
def _spans(draw: st.DrawFn) -> ScheduledSpan:
    start, num_own = draw(st.integers(0, 20)), draw(st.sampled_from([1, 1, 1, 2, 5, 9]))
    samples = draw(st.booleans())
    num_drafts = draw(st.integers(0, 3)) if samples else 0
    end = start + num_own + num_drafts
    token_ids = draw(st.lists(st.integers(0, 99), min_size=num_own + num_drafts, max_size=num_own + num_drafts))
    num_blocks = -(-end // _BLOCK_SIZE)
    table = draw(st.lists(st.integers(0, 1000).map(BlockId), min_size=num_blocks, max_size=num_blocks))
    return ScheduledSpan(
        seq_id="a",
        start=start,
        token_ids=tuple(token_ids[:num_own]),
        num_prompt_tokens=draw(st.integers(1, 30)),
        block_table=tuple(table),
        sampling=_SAMPLING if samples else None,
        output_position=0,
        draft_token_ids=tuple(token_ids[num_own:]),
        scored_token_ids=tuple(token_ids[:num_own]) if draw(st.booleans()) else (),
    )


def _branch(sampling: SamplingParams | None) -> ScheduledSpan:
    return ScheduledSpan("b", 3, (), 3, (), sampling, 0)


@settings(max_examples=50, deadline=None)
@given(st.lists(_spans(), min_size=1, max_size=6), st.lists(st.booleans(), max_size=2))
def test_each_position_has_its_token_its_slot_and_its_row(spans: list[ScheduledSpan], branches: list[bool]) -> None:
    branch_spans = [_branch(_SAMPLING if samples else None) for samples in branches]

    built = ModelInput.build(ScheduledBatch((*spans, *branch_spans)), _BLOCK_SIZE)

    token_ids = [token_id for span in spans for token_id in (*span.token_ids, *span.draft_token_ids)]
    assert built.token_ids.tolist() == token_ids
    rows = [(span, span.start + place) for span in spans for place in range(len(span.token_ids + span.draft_token_ids))]
    assert built.positions.tolist() == [position for _, position in rows]
    assert built.rope_lengths.tolist() == [max(position + 1, span.num_prompt_tokens) for span, position in rows]
    assert built.slot_mapping.tolist() == [
        span.block_table[position // _BLOCK_SIZE] * _BLOCK_SIZE + position % _BLOCK_SIZE for span, position in rows
    ]
    sampled = [
        row
        for row, (span, position) in enumerate(rows)
        if span.sampling is not None and position >= span.start + len(span.token_ids) - 1
    ]
    assert built.sample_rows.tolist() == sampled + [len(rows) - 1 for samples in branches if samples]


@settings(max_examples=50, deadline=None)
@given(st.lists(_spans(), min_size=1, max_size=6))
def test_spans_follow_one_another_with_their_own_tables(spans: list[ScheduledSpan]) -> None:
    built = ModelInput.build(ScheduledBatch(tuple(spans)), _BLOCK_SIZE)

    lengths = [len(span.token_ids + span.draft_token_ids) for span in spans]
    assert [own.query_len for own in built.spans] == lengths
    assert [own.query_start for own in built.spans] == [sum(lengths[:index]) for index in range(len(spans))]
    assert [own.context_len for own in built.spans] == [
        span.start + length for span, length in zip(spans, lengths, strict=True)
    ]
    assert [tuple(own.block_table.tolist()) for own in built.spans] == [span.block_table for span in spans]
    scored = [span.scored_token_ids for span in spans if span.scored_token_ids]
    assert [tuple(own.token_ids.tolist()) for own in built.scored_rows] == scored


def test_a_batch_in_mid_prompt_samples_nothing() -> None:
    span = ScheduledSpan("a", 0, (5, 6), 9, (BlockId(2),), None, 0)

    built = ModelInput.build(ScheduledBatch((span,)), _BLOCK_SIZE)

    assert built.sample_rows.dtype is torch.int64 and built.sample_rows.tolist() == []
