"""Branches of one prompt: computed once, held once, copied on write, and each the same as a request of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.llm import LLM
from pdserve.engine.prefix_tree import PrefixTree
from pdserve.engine.ranking import best_indexes, logprob_per_token
from pdserve.engine.sampling_params import SamplingParams, branch_seed
from pdserve.engine.scheduled_batch import ScheduledBatch
from pdserve.engine.scheduler import Scheduler, SchedulerConfig
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import SampledToken, StepOutput

_BLOCK_SIZE = 4
_PROMPT = tuple(range(20, 33))  # three full blocks and one token in the fourth
_SEEDED = SamplingParams(max_tokens=12, temperature=1.3, seed=11, ignore_eos=True)


def _scheduler(num_blocks: int = 64, max_num_seqs: int = 8, budget: int = 64) -> Scheduler:
    pool = BlockPool(num_blocks)
    config = SchedulerConfig(max_num_seqs, budget, max_model_len=64)
    return Scheduler(config, pool, PrefixTree(pool, _BLOCK_SIZE), _BLOCK_SIZE, frozenset({0}))


def _specs(count: int, sampling: SamplingParams, prompt: Sequence[int] = _PROMPT, **fields: Any) -> list[SequenceSpec]:
    return [SequenceSpec(f"b{i}", tuple(prompt), sampling.branch(i), **fields) for i in range(count)]


def _step(scheduler: Scheduler, token_id: int = 9) -> tuple[ScheduledBatch, list[StepOutput]]:
    batch = scheduler.schedule()
    sampled = [SampledToken(token_id) if span.sampling is not None else None for span in batch.spans]
    outputs = scheduler.update(batch, sampled)
    scheduler.check_integrity()
    return batch, outputs


def test_prompt_blocks_are_held_once_and_copied_by_who_writes_while_others_hold_them() -> None:
    scheduler = _scheduler()
    scheduler.add_branches(_specs(4, _SEEDED))

    batch, outputs = _step(scheduler)

    assert batch.num_tokens == len(_PROMPT) and [output.seq_id for output in outputs] == ["b0", "b1", "b2", "b3"]
    assert scheduler.pool.usage().in_use == 4  # of all four branches, the partial block included
    assert scheduler.pool.num_table_entries == 4 * 4
    batch, _ = _step(scheduler)
    assert len(batch.block_copies) == 3  # the last holder writes in place
    assert len({copy.source for copy in batch.block_copies}) == 1
    assert scheduler.pool.usage().in_use == 3 + 4
    batch, _ = _step(scheduler)
    assert not batch.block_copies


def test_prompt_that_fills_its_blocks_is_never_copied() -> None:
    scheduler = _scheduler()
    scheduler.add_branches(_specs(5, _SEEDED, _PROMPT[:12]))

    copies = [len(_step(scheduler)[0].block_copies) for _ in range(4)]

    assert copies == [0, 0, 0, 0]
    assert scheduler.pool.usage().in_use == 3 + 5


def test_branches_beyond_the_batch_wait_with_the_shared_blocks() -> None:
    scheduler = _scheduler(max_num_seqs=2)
    scheduler.add_branches(_specs(5, _SEEDED))
    _step(scheduler)

    assert (scheduler.num_running, scheduler.num_waiting) == (2, 3)
    assert scheduler.pool.usage().in_use == 4
    while scheduler.has_work:
        assert _step(scheduler)[0].num_tokens <= 2
    assert scheduler.num_sequences == 0 and scheduler.pool.usage().in_use == 0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_end_of_the_leader_hands_the_prompt_on(num_steps: int) -> None:
    scheduler = _scheduler(budget=5)
    scheduler.add_branches(_specs(3, _SEEDED))
    num_computed = sum(_step(scheduler)[0].num_tokens for _ in range(num_steps))

    assert scheduler.abort("b0")
    scheduler.check_integrity()

    ended = set()
    while scheduler.has_work:
        batch, outputs = _step(scheduler)
        num_computed += batch.num_tokens
        ended |= {output.seq_id for output in outputs if output.finish_reason is not None}
    assert ended == {"b1", "b2"}
    if num_steps < 3:
        assert num_computed == len(_PROMPT) + 2 * (12 - 1)
    assert scheduler.num_sequences == 0 and scheduler.pool.usage().in_use == 0


def test_leader_that_is_aborted_while_its_step_runs_leaves_the_step_to_be_repeated() -> None:
    scheduler = _scheduler()
    scheduler.add_branches(_specs(3, _SEEDED))
    batch = scheduler.schedule()
    scheduler.abort("b0")

    assert scheduler.update(batch, [SampledToken(9)] * 3) == []
    assert [output.seq_id for output in _step(scheduler)[1]] == ["b1", "b2"]


def test_follower_that_leaves_before_the_prompt_is_computed_costs_nothing() -> None:
    scheduler = _scheduler(budget=5)
    scheduler.add_branches(_specs(3, _SEEDED))
    _step(scheduler)
    scheduler.abort("b1")
    _step(scheduler)

    assert [output.seq_id for output in _step(scheduler)[1]] == ["b0", "b2"]


def test_exported_branches_leave_one_table() -> None:
    scheduler = _scheduler()
    scheduler.add_branches(_specs(3, _SEEDED, is_export=True))

    _, outputs = _step(scheduler)

    assert [len(output.exported_blocks) for output in outputs] == [4, 0, 0]
    assert scheduler.pool.usage().in_flight == 4 and scheduler.num_sequences == 1
    scheduler.release_export("b0")
    scheduler.check_integrity()
    assert scheduler.pool.usage().in_flight == 0


@pytest.mark.parametrize("ended", [set(), {"b0"}, {"b1"}, {"b0", "b1", "b2"}])
def test_imported_prompt_is_shared_by_the_branches_that_go_on(ended: set[str]) -> None:
    scheduler = _scheduler()
    scheduler.add_import(*_specs(3, _SEEDED))
    ((seq_id, needed),) = scheduler.grant_imports()
    assert (seq_id, needed) == ("b0", (0, 1, 2, 3))

    tokens = {f"b{i}": [40 + i] for i in range(3) if f"b{i}" not in ended}
    scheduler.commit_import("b0", tokens.get("b0", ()), tokens)
    scheduler.check_integrity()

    assert scheduler.num_sequences == 3 - len(ended)
    assert scheduler.pool.usage().in_use == (4 if tokens else 0)
    going = set()
    while scheduler.has_work:
        batch, outputs = _step(scheduler)
        assert batch.num_tokens <= len(tokens)
        going |= {output.seq_id for output in outputs if output.finish_reason is not None}
    assert going == set(tokens)


_EVENTS = st.lists(
    st.tuples(st.sampled_from(["add", "step", "step", "abort"]), st.integers(0, 9), st.integers(1, 5)), max_size=40
)


@settings(max_examples=60, deadline=None)
@given(events=_EVENTS, num_blocks=st.integers(18, 40), max_num_seqs=st.integers(1, 6))
def test_random_branches_end_with_nothing_held(
    events: list[tuple[str, int, int]], num_blocks: int, max_num_seqs: int
) -> None:
    scheduler = _scheduler(num_blocks, max_num_seqs, budget=7)
    ids: list[str] = []
    for number, (kind, size, count) in enumerate(events):
        if kind == "add":
            prompt = tuple(range(1 + size, 14))
            specs = [SequenceSpec(f"{number}-{i}", prompt, _SEEDED.branch(i)) for i in range(count)]
            scheduler.add_branches(specs)
            ids += [spec.seq_id for spec in specs]
        elif kind == "abort" and ids:
            scheduler.abort(ids[size % len(ids)])
        else:
            _step(scheduler)
        scheduler.check_integrity()
    for _ in range(2000):
        if not scheduler.has_work:
            break
        _step(scheduler)
    usage = scheduler.pool.usage()
    assert (scheduler.num_sequences, usage.in_use, usage.in_flight) == (0, 0, 0)


def _engine(model_dir: Path, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"block_size": _BLOCK_SIZE, "num_blocks": 256, "max_num_batched_tokens": 64}
    return Engine.load(EngineConfig(model_dir=model_dir, **{**defaults, **options}))


def _tokens(engine: Engine, groups: list[list[SequenceSpec]]) -> dict[str, list[int]]:
    for specs in groups:
        engine.add_branches(specs)
    tokens: dict[str, list[int]] = {spec.seq_id: [] for specs in groups for spec in specs}
    while engine.scheduler.has_work:
        for output in engine.step():
            assert output.failure is None
            if output.token is not None and output.token.token_id is not None:
                tokens[output.seq_id].append(output.token.token_id)
        engine.scheduler.check_integrity()
    return tokens


@pytest.mark.parametrize("features", [{}, {"presence_penalty": 1.5, "min_tokens": 3}, {"temperature": 0.0}])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"num_blocks": 11, "max_num_seqs": 3},
        {"max_num_seqs": 1},
        {"enable_prefix_cache": False, "block_size": 16},
    ],
    ids=["roomy", "small chunks", "preemption", "one at a time", "no cache"],
)
def test_branch_equals_the_single_request_of_its_seed(
    tiny_model: Any, options: dict[str, Any], features: dict[str, Any]
) -> None:
    model_dir = tiny_model()
    sampling = SamplingParams(**{"max_tokens": 12, "temperature": 1.3, "seed": 11, "ignore_eos": True, **features})
    specs = _specs(5, sampling)
    alone = {spec.seq_id: _tokens(_engine(model_dir), [[spec]])[spec.seq_id] for spec in specs}
    neighbour = SequenceSpec("neighbour", tuple(range(50, 70)), _SEEDED)

    together = _tokens(_engine(model_dir, **options), [[neighbour], specs])

    assert {seq_id: together[seq_id] for seq_id in alone} == alone


def test_forked_prompt_is_computed_once_and_scored_for_each_branch(tiny_model: Any) -> None:
    llm = LLM(str(tiny_model()), block_size=_BLOCK_SIZE, num_blocks=64)
    scored = SamplingParams(max_tokens=2, n=3, seed=1, prompt_logprobs=0, ignore_eos=True)

    (output,) = llm.generate([_PROMPT], scored, use_tqdm=False)

    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(_PROMPT)
    assert output.num_cached_tokens == 0


def test_generate_gives_n_completions_of_their_own_seeds(tiny_model: Any) -> None:
    llm = LLM(str(tiny_model()), block_size=_BLOCK_SIZE, num_blocks=64)

    many = llm.generate([_PROMPT, _PROMPT[:5]], SamplingParams(max_tokens=6, n=3, seed=5), use_tqdm=False)

    assert [[c.index for c in output.outputs] for output in many] == [[0, 1, 2]] * 2
    for output in many:
        for completion in output.outputs:
            single = SamplingParams(max_tokens=6, seed=branch_seed(5, completion.index))
            (alone,) = llm.generate([output.prompt_token_ids], single, use_tqdm=False)
            assert alone.outputs[0].token_ids == completion.token_ids
            assert completion.logprobs is None


def test_best_of_keeps_the_likeliest_per_token_in_order(tiny_model: Any) -> None:
    llm = LLM(str(tiny_model()), block_size=_BLOCK_SIZE, num_blocks=64)
    every = SamplingParams(max_tokens=6, n=6, seed=5, logprobs=0)
    (candidates,) = llm.generate([_PROMPT], every, use_tqdm=False)
    scores = {
        c.token_ids: logprob_per_token([t.logprob for t in c.logprobs or () if t.logprob is not None])
        for c in candidates.outputs
    }
    expected = sorted(scores, key=lambda token_ids: -scores[token_ids])[:2]

    (best,) = llm.generate([_PROMPT], SamplingParams(max_tokens=6, n=2, best_of=6, seed=5), use_tqdm=False)

    assert [completion.token_ids for completion in best.outputs] == expected
    assert [(completion.index, completion.logprobs) for completion in best.outputs] == [(0, None), (1, None)]


def test_best_is_the_mean_and_ties_keep_their_order() -> None:
    assert best_indexes([-2.0, -1.0, -1.0, float("-inf")], 3) == [1, 2, 0]
    assert logprob_per_token([-1.0, -3.0]) == -2.0
    assert logprob_per_token([]) == float("-inf")
