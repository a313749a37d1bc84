"""Scheduler: pure decisions over random arrivals, imports, exports and aborts, with a model that echoes a counter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.prefix_tree import PrefixTree
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduled_batch import ScheduledBatch
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.scheduler_config import SchedulerConfig
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import FinishReason, SampledToken, StepOutput

_BLOCK_SIZE = 4
_EOS = 0


def _scheduler(num_blocks: int = 16, max_num_seqs: int = 8, budget: int = 16, max_len: int = 64) -> Scheduler:
    pool = BlockPool(num_blocks)
    config = SchedulerConfig(max_num_seqs, budget, max_len)
    return Scheduler(config, pool, PrefixTree(pool, _BLOCK_SIZE), _BLOCK_SIZE, frozenset({_EOS}))


def _spec(seq_id: str, num_prompt: int, max_tokens: int, is_export: bool = False, first: int = 1) -> SequenceSpec:
    prompt = tuple(first + i for i in range(num_prompt))
    return SequenceSpec(seq_id, prompt, SamplingParams(max_tokens=max_tokens, seed=0), is_export=is_export)


def _step(scheduler: Scheduler, token_id: int = 9) -> list[StepOutput]:
    batch = scheduler.schedule()
    sampled = [SampledToken(token_id) if span.sampling is not None else None for span in batch.spans]
    return scheduler.update(batch, sampled)


def _run(scheduler: Scheduler, limit: int = 2000) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    for _ in range(limit):
        if not scheduler.has_work:
            return outputs
        for output in _step(scheduler):
            outputs.setdefault(output.seq_id, []).append(output)
        scheduler.check_integrity()
    raise AssertionError("no end in sight")


def test_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    scheduler = _scheduler(budget=6)
    scheduler.add(_spec("a", 15, 1))

    progress = [output.num_computed_tokens for output in _run(scheduler)["a"]]

    assert progress == [6, 12, 15]


def test_decode_is_not_held_up_by_a_prompt() -> None:
    scheduler = _scheduler(budget=8)
    scheduler.add(_spec("decoding", 4, 10))
    _step(scheduler)
    scheduler.add(_spec("long", 40, 1, first=100))

    for _ in range(4):
        batch = scheduler.schedule()
        assert batch.spans[0].seq_id == "decoding"
        assert batch.num_tokens <= 8
        scheduler.update(batch, [SampledToken(9) if span.sampling else None for span in batch.spans])


def test_landed_sequence_joins_at_once_although_a_prompt_takes_the_whole_budget() -> None:
    scheduler = _scheduler(budget=8, num_blocks=40)
    scheduler.add(_spec("long", 60, 1))
    _step(scheduler)
    scheduler.add_import(_spec("landed", 4, 5, first=200))
    scheduler.grant_imports()
    scheduler.commit_import("landed", [9])

    batch = scheduler.schedule()

    assert [(span.seq_id, len(span.token_ids)) for span in batch.spans] == [("landed", 1), ("long", 7)]


def test_preempted_sequence_is_computed_again_and_gives_every_token_once() -> None:
    scheduler = _scheduler(num_blocks=6)
    scheduler.add(_spec("a", 4, 16))
    scheduler.add(_spec("b", 4, 16, first=50))

    outputs = _run(scheduler)

    assert scheduler.num_preemptions > 0
    for seq_id in ("a", "b"):
        positions = [output.output_position for output in outputs[seq_id] if output.token is not None]
        assert positions == list(range(16))
        assert outputs[seq_id][-1].finish_reason is FinishReason.LENGTH


def test_request_that_can_never_fit_is_refused_by_name() -> None:
    scheduler = _scheduler(num_blocks=4)

    with pytest.raises(InvalidRequest) as error:
        scheduler.add(_spec("a", 10, 7))

    assert error.value.field == "max_tokens"
    assert scheduler.num_sequences == 0


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 1), (1, 2), (4, 5)])
def test_eos_ends_a_sequence_once_min_tokens_exist(min_tokens: int, expected: int) -> None:
    """C043: EOS may be the output at 0-based index min_tokens, no earlier; it counts."""
    scheduler = _scheduler()
    sampling = SamplingParams(max_tokens=10, min_tokens=min_tokens, seed=0)
    scheduler.add(SequenceSpec("a", (1, 2), sampling))
    outputs: list[StepOutput] = []

    while scheduler.has_work:
        batch = scheduler.schedule()
        position = batch.spans[0].output_position
        outputs += scheduler.update(batch, [SampledToken(_EOS if position >= min_tokens else 9)])

    assert len(outputs) == expected
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_ignore_eos_runs_to_the_length() -> None:
    """C047."""
    scheduler = _scheduler()
    scheduler.add(SequenceSpec("a", (1,), SamplingParams(max_tokens=5, ignore_eos=True, seed=0)))

    while scheduler.has_work:
        last = _step(scheduler, token_id=_EOS)[-1]

    assert (last.output_position, last.finish_reason) == (4, FinishReason.LENGTH)


def test_second_prompt_reuses_the_full_blocks_of_the_first() -> None:
    scheduler = _scheduler()
    scheduler.add(_spec("a", 10, 1))
    _run(scheduler)
    scheduler.add(_spec("b", 10, 1))

    outputs = _run(scheduler)["b"]

    assert outputs[0].num_cached_tokens == 8


def test_fully_cached_prompt_still_computes_its_last_token() -> None:
    scheduler = _scheduler()
    scheduler.add(_spec("a", 8, 1))
    _run(scheduler)
    scheduler.add(_spec("b", 8, 1))

    batch = scheduler.schedule()

    assert (batch.spans[0].start, len(batch.spans[0].token_ids)) == (4, 4)


def test_exported_sequence_keeps_its_blocks_in_flight_until_released() -> None:
    scheduler = _scheduler()
    scheduler.add(_spec("a", 10, 5, is_export=True))

    outputs = _run(scheduler)["a"]

    assert outputs[-1].token is not None and outputs[-1].finish_reason is None
    assert len(outputs[-1].exported_blocks) == 3
    assert scheduler.pool.usage().in_flight == 3
    scheduler.abort("a")
    assert (scheduler.pool.usage().in_flight, scheduler.pool.usage().cached) == (0, 2)
    scheduler.check_integrity()


def test_import_asks_only_for_missing_blocks_and_computes_no_prompt_token() -> None:
    scheduler = _scheduler()
    scheduler.add(_spec("warm", 10, 1))
    _run(scheduler)
    scheduler.add_import(_spec("a", 10, 5))

    assert scheduler.grant_imports() == [("a", (2,))]
    scheduler.commit_import("a", [9])
    batch = scheduler.schedule()

    assert (batch.spans[0].start, batch.spans[0].token_ids) == (10, (9,))


def test_import_without_room_waits_its_turn() -> None:
    scheduler = _scheduler(num_blocks=6)
    scheduler.add_import(_spec("a", 16, 4))
    scheduler.add_import(_spec("b", 16, 4, first=50))

    assert [seq_id for seq_id, _ in scheduler.grant_imports()] == ["a"]
    assert scheduler.grant_imports() == []
    scheduler.abort("a")
    assert [seq_id for seq_id, _ in scheduler.grant_imports()] == ["b"]


def test_landed_sequences_that_wait_give_way_to_running_ones() -> None:
    """Without this, blocks held by waiting sequences could starve the only running one for ever."""
    scheduler = _scheduler(num_blocks=9, max_num_seqs=1)
    scheduler.add(_spec("running", 4, 20))
    _step(scheduler)
    for name, first in (("x", 50), ("y", 80)):
        scheduler.add_import(_spec(name, 6, 4, first=first))
    scheduler.grant_imports()
    for name in ("x", "y"):
        scheduler.commit_import(name, [9])

    outputs = _run(scheduler)

    assert {seq_id: out[-1].finish_reason for seq_id, out in outputs.items()} == dict.fromkeys(
        ("running", "x", "y"), FinishReason.LENGTH
    )


_actions = st.lists(
    st.tuples(st.sampled_from(["add", "export", "import", "commit", "abort", "step", "step"]), st.integers(1, 14)),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(_actions, st.integers(5, 12), st.integers(1, 4), st.integers(1, 9))
def test_random_arrivals_end_with_nothing_held(
    actions: list[tuple[str, int]], num_blocks: int, max_num_seqs: int, budget: int
) -> None:
    scheduler = _scheduler(num_blocks, max_num_seqs, budget)
    alive: list[str] = []
    granted: list[str] = []
    for number, (action, size) in enumerate(actions):
        seq_id = str(number)
        if action in ("add", "export"):
            scheduler.add(_spec(seq_id, size, 1 + size % 5, is_export=action == "export", first=size % 2))
            alive.append(seq_id)
        elif action == "import":
            scheduler.add_import(_spec(seq_id, size, 2 + size % 5, first=size % 2))
            alive.append(seq_id)
        elif action == "commit" and granted:
            seq_id = granted.pop(0)
            if scheduler.block_table(seq_id):
                scheduler.commit_import(seq_id, [9])
        elif action == "abort" and alive:
            scheduler.abort(alive.pop(size % len(alive)))
        elif action == "step":
            _check_batch(scheduler, scheduler.schedule(), budget, max_num_seqs)
        granted += [seq_id for seq_id, _ in scheduler.grant_imports()]
        scheduler.check_integrity()
    for seq_id in alive:
        scheduler.abort(seq_id)
    assert scheduler.num_sequences == 0
    assert scheduler.pool.usage().in_use == scheduler.pool.usage().in_flight == 0


def _check_batch(scheduler: Scheduler, batch: ScheduledBatch, budget: int, max_num_seqs: int) -> None:
    assert batch.num_tokens <= budget
    assert len(batch.spans) <= max_num_seqs
    for span in batch.spans:
        assert len(span.block_table) == -(-(span.start + len(span.token_ids)) // _BLOCK_SIZE)
        assert span.token_ids
    scheduler.update(batch, [SampledToken(9) if span.sampling is not None else None for span in batch.spans])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), min_size=1, max_size=8), st.integers(6, 10))
def test_every_request_finishes_whatever_the_pressure(requests: list[tuple[int, int]], num_blocks: int) -> None:
    scheduler = _scheduler(num_blocks, max_num_seqs=4, budget=5)
    for number, (num_prompt, max_tokens) in enumerate(requests):
        scheduler.add(_spec(str(number), num_prompt, max_tokens, first=number % 3))

    outputs = _run(scheduler)

    for number, (_, max_tokens) in enumerate(requests):
        positions = [output.output_position for output in outputs[str(number)] if output.token is not None]
        assert positions == list(range(max_tokens))
    usage = scheduler.pool.usage()
    assert usage.free + usage.cached == usage.total
