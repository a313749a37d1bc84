"""A draft model changes how fast tokens come and nothing else, and what it holds is bounded and freed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.engine.config import EngineConfig
from pdserve.engine.draft_model import DraftedSequence, DraftModelDrafter
from pdserve.engine.drafts import DraftRequest
from pdserve.engine.engine import Engine
from pdserve.engine.errors import ModelError
from pdserve.engine.llm import LLM
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduled_batch import ScheduledSpan
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.speculative_config import SpeculativeConfig, SpeculativeMethod
from pdserve.engine.speculator import SpeculationCounts
from pdserve.engine.step_output import SampledToken
from pdserve.kernels.cpu import CpuKernels

_FEW: dict[str, Any] = {"allowed_token_ids": (2, *range(50, 57)), "ignore_eos": True, "seed": 3}
_GREEDY = SamplingParams(max_tokens=20, temperature=0.0, **_FEW)
_SEEDED = SamplingParams(max_tokens=20, temperature=1.2, top_p=0.95, logprobs=1, **_FEW)
_needs_exact_kernels = pytest.mark.skipif(CpuKernels.load(1) is None, reason="rows of torch differ in their last bits")

Tokens = dict[str, list[SampledToken]]


def _engine(model_dir: Path, draft_dir: Path | None = None, draft_kv: int = 2**20, **options: Any) -> Engine:
    speculative = None
    if draft_dir is not None:
        speculative = SpeculativeConfig(
            method=SpeculativeMethod.DRAFT_MODEL,
            model=str(draft_dir),
            num_speculative_tokens=3,
            draft_kv_memory_bytes=draft_kv,
            adaptive=False,
        )
    defaults: dict[str, Any] = {"block_size": 4, "num_blocks": 256, "max_num_batched_tokens": 64}
    config = EngineConfig(model_dir=model_dir, speculative_config=speculative, **{**defaults, **options})
    return Engine.load(config)


def _specs(sampling: SamplingParams) -> list[SequenceSpec]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 199, (length,), generator=generator).tolist() for length in (1, 3, 4, 21, 40, 50)]
    return [SequenceSpec(str(index), tuple(prompt), sampling) for index, prompt in enumerate(prompts)]


def _run(engine: Engine, specs: list[SequenceSpec]) -> Tokens:
    for spec in specs:
        engine.add(spec)
    tokens: Tokens = {spec.seq_id: [] for spec in specs}
    while engine.scheduler.has_work:
        for output in engine.step():
            if output.token is not None:
                tokens[output.seq_id].append(output.token)
        engine.check_integrity()
    assert engine.pool.usage().in_use == 0
    return tokens


def _counts(engine: Engine) -> SpeculationCounts:
    counts = engine.load_now().speculation
    assert counts is not None and counts.method == "draft_model"
    return counts


@pytest.mark.parametrize("sampling", [_GREEDY, _SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 9},
        {"num_blocks": 24, "max_num_seqs": 5},
        {"draft_kv": 2**16},
    ],
    ids=["together", "small chunks", "preemption", "little memory for drafts"],
)
def test_a_draft_model_changes_nothing(tiny_model: Any, options: dict[str, Any], sampling: SamplingParams) -> None:
    model_dir = tiny_model()
    draft_dir = tiny_model(seed=4, num_hidden_layers=1, num_key_value_heads=1)
    expected = _run(_engine(model_dir), _specs(sampling))
    engine = _engine(model_dir, draft_dir, **options)

    results = _run(engine, _specs(sampling))

    assert {seq_id: [token.token_id for token in tokens] for seq_id, tokens in results.items()} == {
        seq_id: [token.token_id for token in tokens] for seq_id, tokens in expected.items()
    }
    for seq_id, tokens in expected.items():
        assert [token.logprob for token in results[seq_id]] == pytest.approx(
            [token.logprob for token in tokens], abs=1e-4
        )
    assert 0 < _counts(engine).num_accepted < _counts(engine).num_drafted


@_needs_exact_kernels
@pytest.mark.parametrize(
    "sampling",
    [_GREEDY, _SEEDED, replace(_SEEDED, frequency_penalty=0.5, bad_words_ids=((50, 51), (52,)))],
    ids=["greedy", "seeded", "with history"],
)
def test_the_model_drafting_for_itself_is_always_right(tiny_model: Any, sampling: SamplingParams) -> None:
    """The same noise, the same history, the same position: each token but the first of a step is a draft accepted."""
    engine = _engine(tiny_model(), tiny_model())

    _run(engine, _specs(sampling))

    counts = _counts(engine)
    assert counts.num_accepted == counts.num_drafted > 60


def test_equal_noise_makes_unequal_models_agree_more_often(tiny_model: Any) -> None:
    """Against a draft model that samples for another seed, over the same 1,200 tokens."""
    model_dir, draft_dir = tiny_model(), tiny_model(seed=4, num_hidden_layers=1)
    sampling = replace(_SEEDED, temperature=2.0, max_tokens=40, top_p=1.0)
    specs = [SequenceSpec(str(n), (5, 6, 7 + n), replace(sampling, seed=n)) for n in range(30)]
    outputs = _run(_engine(model_dir), specs)
    drafter = _drafter(model_dir, draft_dir)
    num_right = {0: 0, 1000: 0}
    for spec in specs:
        token_ids = [*spec.prompt_token_ids, *(token.token_id or 0 for token in outputs[spec.seq_id])]
        for shift in num_right:
            for length in range(4, len(token_ids), 3):
                seeded = replace(sampling, seed=(spec.sampling.seed or 0) + shift)
                span = ScheduledSpan(spec.seq_id, length - 1, (token_ids[length - 1],), 3, (), seeded, length - 3)
                ((drafted,),) = drafter.propose([DraftRequest(span, token_ids[:length], 1)]).token_ids
                num_right[shift] += drafted == token_ids[length]
        drafter.forget(spec.seq_id)

    assert num_right[0] > 1.3 * num_right[1000]


def test_abort_at_every_step_frees_the_blocks_of_drafts(tiny_model: Any) -> None:
    engine = _engine(tiny_model(), tiny_model(seed=4, num_hidden_layers=1), max_num_batched_tokens=24)
    for num_steps in range(12):
        for spec in _specs(_GREEDY):
            engine.add(spec)
        for _ in range(num_steps):
            engine.step()
        for spec in _specs(_GREEDY):
            engine.scheduler.abort(spec.seq_id)
        engine.check_integrity()
    assert _counts(engine).num_drafted > 0


def test_blocks_are_bounded_shared_out_anew_and_freed(tiny_model: Any) -> None:
    """Whoever is not in the batch gives way; whoever is, does not, and then there are no drafts."""
    drafter = _drafter(tiny_model(), tiny_model(), draft_kv=2**16)
    size = drafter.pool.num_blocks * 4  # tokens
    token_ids = [5, 6, 7, 8] * (size // 4)

    def propose(*wanted: tuple[str, int]) -> list[int]:
        requests = [
            DraftRequest(ScheduledSpan(seq_id, length - 1, (7,), 2, (), _GREEDY, 1), token_ids[:length], 2)
            for seq_id, length in wanted
        ]
        return [len(drafts) for drafts in drafter.propose(requests).token_ids]

    assert propose(("a", size // 2)) == [2]
    assert propose(("a", size // 2), ("b", size - 3)) == [2, 0]
    assert propose(("b", size - 3)) == [2]
    assert propose(("c", size)) == [0]
    for seq_id in list(drafter.seq_ids):
        drafter.forget(seq_id)
    drafter.pool.check_integrity()
    assert drafter.pool.num_free == drafter.pool.num_blocks


def test_a_long_prompt_is_caught_up_with_in_parts_before_there_are_drafts(tiny_model: Any) -> None:
    drafter = _drafter(tiny_model(), tiny_model(), max_num_batched_tokens=16)
    request = DraftRequest(ScheduledSpan("a", 39, (7,), 39, (), _GREEDY, 1), list(range(60, 100)), 2)

    proposals = [drafter.propose([request]) for _ in range(4)]

    assert [len(drafts.token_ids[0]) for drafts in proposals] == [0, 0, 2, 2]
    assert [drafts.is_catching_up for drafts in proposals] == [True, True, True, False]


def test_sequences_beyond_the_draft_models_context_go_on_without_drafts(tiny_model: Any) -> None:
    model_dir = tiny_model()
    engine = _engine(model_dir, tiny_model(seed=4, max_position_embeddings=32))

    results = _run(engine, _specs(_GREEDY))

    assert results == _run(_engine(model_dir), _specs(_GREEDY))
    assert _counts(engine).num_drafted > 0


def test_a_draft_model_with_another_vocabulary_is_refused(tiny_model: Any) -> None:
    with pytest.raises(ModelError, match=r"cannot draft for .* share the vocabulary"):
        _engine(tiny_model(), tiny_model(vocab_size=150))


def test_rewinding_keeps_what_was_guessed_right() -> None:
    sequence = DraftedSequence()
    sequence.token_ids = [1, 2, 3, 4, 5, 6]

    sequence.rewind([1, 2, 3, 4, 9, 8])
    assert (sequence.token_ids, sequence.num_verified) == ([1, 2, 3, 4], 4)

    sequence.rewind([1, 2, 3])
    assert (sequence.token_ids, sequence.num_verified) == ([1, 2], 2)


def _drafter(model_dir: Path, draft_dir: Path, draft_kv: int = 2**20, **options: Any) -> DraftModelDrafter:
    speculative = SpeculativeConfig(
        method=SpeculativeMethod.DRAFT_MODEL, model=str(draft_dir), draft_kv_memory_bytes=draft_kv
    )
    return DraftModelDrafter.load(EngineConfig(model_dir=model_dir, block_size=4, **options), speculative)


def test_an_llm_takes_a_draft_model_by_name_and_branches_of_a_prompt_use_it(tiny_model: Any) -> None:
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 64}
    drafting = LLM(
        tiny_model(),
        speculative_config={"model": str(tiny_model(seed=4)), "num_speculative_tokens": 2, "adaptive": False},
        **options,
    )
    sampling = replace(_SEEDED, n=3)

    results = drafting.generate([[5, 6, 7, 8, 9]], sampling, use_tqdm=False)

    expected = LLM(tiny_model(), **options).generate([[5, 6, 7, 8, 9]], sampling, use_tqdm=False)
    assert [output.token_ids for output in results[0].outputs] == [output.token_ids for output in expected[0].outputs]
