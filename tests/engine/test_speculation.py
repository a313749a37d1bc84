"""Speculation changes how fast tokens come and nothing else: tokens and logprobs as floats, in any company."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import FinishReason, SampledToken, StepOutput
from pdserve.engine.swap_rule import PreemptionMode
from pdserve.engine.tokenizer import Tokenizer
from pdserve.kernels.cpu import CpuKernels

# Random models repeat themselves little; of few tokens, some follow one another again.
_FEW: dict[str, Any] = {"allowed_token_ids": (2, *range(50, 57)), "ignore_eos": True, "logprobs": 3}
_GREEDY = SamplingParams(max_tokens=30, temperature=0.0, seed=0, **_FEW)
_SEEDED = SamplingParams(max_tokens=30, temperature=0.9, top_p=0.95, seed=11, **_FEW)
_NGRAM = {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
_HISTORY: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.4},
    "repetition": {"repetition_penalty": 1.3},
    "bad words": {"bad_words_ids": [[token_id, token_id + 1] for token_id in range(50, 56)]},
    "min tokens": {"ignore_eos": False, "min_tokens": 12, "stop_token_ids": (54, 56)},
    "stop ids": {"ignore_eos": False, "stop_token_ids": (56,)},
}

Results = dict[str, tuple[list[SampledToken], FinishReason | None]]


def _engine(model_dir: Path, speculative: dict[str, Any] | None = None, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"block_size": 4, "num_blocks": 256, "max_num_batched_tokens": 64}
    config = EngineConfig(model_dir=model_dir, speculative_config=speculative, **{**defaults, **options})  # type: ignore[arg-type]  # a mapping is taken too
    return Engine.load(config)


def _specs(sampling: SamplingParams) -> list[SequenceSpec]:
    """Prompts that repeat themselves, of lengths around a block's border, some with a common beginning."""
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(3, 199, (9,), generator=generator).tolist()
    prompts = [torch.randint(3, 199, (length,), generator=generator).tolist() for length in (1, 3, 4, 7, 13, 16)]
    prompts = [(shared if index % 2 else []) + prompt * 3 for index, prompt in enumerate(prompts)]
    return [SequenceSpec(str(index), tuple(prompt), sampling) for index, prompt in enumerate(prompts)]


def _run(engine: Engine, specs: list[SequenceSpec]) -> Results:
    for spec in specs:
        engine.add(spec)
    return _finish(engine, [spec.seq_id for spec in specs])


def _finish(engine: Engine, seq_ids: list[str]) -> Results:
    outputs: dict[str, list[StepOutput]] = {seq_id: [] for seq_id in seq_ids}
    while engine.scheduler.has_work:
        for output in engine.step():
            if output.token is not None:
                outputs[output.seq_id].append(output)
        engine.check_integrity()
    assert engine.pool.usage().in_use == 0
    for each in outputs.values():
        assert [output.output_position for output in each] == list(
            range(each[0].output_position, each[0].output_position + len(each))
        )
    return {
        seq_id: ([output.token for output in each if output.token is not None], each[-1].finish_reason)
        for seq_id, each in outputs.items()
    }


def _num_accepted(engine: Engine) -> int:
    counts = engine.load_now().speculation
    assert counts is not None and 0 < counts.num_accepted <= counts.num_drafted
    return counts.num_accepted


def _assert_same(results: Results, expected: Results) -> None:
    """As floats where the kernels are ours; else equal tokens, and logprobs to 1e-4."""
    if CpuKernels.load(1) is not None:
        assert results == expected
        return
    for seq_id, (tokens, finish_reason) in expected.items():
        assert [token.token_id for token in results[seq_id][0]] == [token.token_id for token in tokens]
        assert results[seq_id][1] == finish_reason
        for ours, theirs in zip(results[seq_id][0], tokens, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("sampling", [_GREEDY, _SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 512},
        {"num_blocks": 34, "max_num_seqs": 5},
        {"num_blocks": 34, "max_num_seqs": 5, "kv_host_memory_bytes": 2**22, "preemption_mode": PreemptionMode.SWAP},
        {"max_num_seqs": 1},
        {"block_size": 7},
        {"enable_prefix_cache": False},
    ],
    ids=["small chunks", "one chunk", "preemption", "swap", "alone", "odd blocks", "no prefix cache"],
)
def test_speculation_changes_nothing_in_any_company(
    tiny_model: Any, options: dict[str, Any], sampling: SamplingParams
) -> None:
    model_dir = tiny_model()
    alone: Results = {}
    for spec in _specs(sampling):
        alone |= _run(_engine(model_dir), [spec])

    engine = _engine(model_dir, _NGRAM, **options)
    together = _run(engine, _specs(sampling))

    _assert_same(together, alone)
    assert _num_accepted(engine) > 0
    if "num_blocks" in options:
        assert engine.load_now().num_preemptions > 0


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("gemma3_text", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
        ("qwen3", {"head_dim": 16}),
        ("gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    ],
    ids=["sliding windows", "norms of heads", "soft caps"],
)
def test_speculation_changes_nothing_on_other_models(
    tiny_model: Any, model_type: str, overrides: dict[str, Any]
) -> None:
    model_dir = tiny_model(model_type, **overrides)
    engine = _engine(model_dir, _NGRAM)

    for sampling in (_GREEDY, _SEEDED):
        _assert_same(_run(engine, _specs(sampling)), _run(_engine(model_dir), _specs(sampling)))
    assert _num_accepted(engine) > 0


@pytest.mark.parametrize(
    "options",
    [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "bfloat16"}, {"dtype": "int8"}],
    ids=["int8 cache", "bfloat16 cache", "int8 weights"],
)
def test_speculation_changes_nothing_in_other_formats(tiny_model: Any, options: dict[str, Any]) -> None:
    model_dir = tiny_model()
    engine = _engine(model_dir, _NGRAM, **options)

    results = _run(engine, _specs(_SEEDED))

    _assert_same(results, _run(_engine(model_dir, **options), _specs(_SEEDED)))
    assert _num_accepted(engine) > 0


def test_speculation_changes_nothing_on_the_demo_model(demo_model_dir: Path) -> None:
    """Two prompts that ask for repetition, greedy and seeded, together and alone; adaptive, as it is served."""
    speculative = {"num_speculative_tokens": 4}
    text = "one two three four five six seven eight nine ten, " * 3
    prompt = tuple(Tokenizer.load(demo_model_dir).encode(text))
    options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "logprobs": 2}
    greedy = SamplingParams(temperature=0.0, seed=0, **options)
    seeded = SamplingParams(temperature=0.8, seed=4, **options)
    specs = [SequenceSpec("greedy", prompt, greedy), SequenceSpec("seeded", prompt[3:], seeded)]
    engine = _engine(demo_model_dir, speculative, block_size=16, num_blocks=32)

    together = _run(engine, specs)

    plain = [replace(spec, sampling=replace(spec.sampling, speculative=False)) for spec in specs]
    _assert_same(together, {spec.seq_id: _run(engine, [spec])[spec.seq_id] for spec in plain})
    assert _num_accepted(engine) > 0


@pytest.mark.parametrize("feature", _HISTORY)
def test_what_depends_on_history_is_computed_for_each_draft(tiny_model: Any, feature: str) -> None:
    sampling = replace(_SEEDED, temperature=0.4, **_HISTORY[feature])
    model_dir = tiny_model()
    engine = _engine(model_dir, _NGRAM)

    results = _run(engine, _specs(sampling))

    _assert_same(results, _run(_engine(model_dir), _specs(sampling)))
    assert _num_accepted(engine) > 0
    if sampling.stop_token_ids:
        assert FinishReason.STOP in [finish_reason for _, finish_reason in results.values()]


def test_warm_cache_and_speculation_agree(tiny_model: Any) -> None:
    """Blocks remembered hold verified tokens only: a second round over them gives the same."""
    model_dir = tiny_model()
    engine = _engine(model_dir, _NGRAM)
    cold = _run(engine, _specs(_SEEDED))

    warm = _run(engine, _specs(_SEEDED))

    _assert_same(warm, cold)
    longer = [
        SequenceSpec(spec.seq_id, (*spec.prompt_token_ids, *_ids(cold[spec.seq_id][0])), _SEEDED)
        for spec in _specs(_SEEDED)
    ]
    _assert_same(_run(engine, longer), _run(_engine(model_dir), longer))


def test_a_sequence_that_goes_on_elsewhere_or_ends_at_the_context_limit(tiny_model: Any) -> None:
    model_dir = tiny_model()
    spec = _specs(_SEEDED)[4]
    whole = _run(_engine(model_dir), [spec])[spec.seq_id]
    moved = replace(spec, output_token_ids=tuple(_ids(whole[0])[:9]))
    engine = _engine(model_dir, _NGRAM, max_model_len=80)

    rest = _run(engine, [moved])[spec.seq_id]

    assert _ids(rest[0]) == _ids(whole[0])[9:]
    endless = replace(spec, sampling=replace(_SEEDED, max_tokens=None))
    tokens, finish_reason = _run(engine, [endless])[spec.seq_id]
    assert len(spec.prompt_token_ids) + len(tokens) == 80
    assert finish_reason is FinishReason.LENGTH
    assert _ids(tokens) == _ids(_run(_engine(model_dir, max_model_len=80), [endless])[spec.seq_id][0])


def test_imported_sequences_speculate_from_their_first_step(tiny_model: Any) -> None:
    model_dir = tiny_model()
    spec = _specs(_GREEDY)[5]
    expected = _run(_engine(model_dir), [spec])[spec.seq_id]
    prefill, decode = _engine(model_dir, _NGRAM), _engine(model_dir, _NGRAM)
    prefill.add(replace(spec, is_export=True))
    output = prefill.step()[-1]
    assert output.token is not None and output.token.token_id is not None
    decode.add_import(spec)
    ((_, missing),) = decode.scheduler.grant_imports()

    decode.land(spec.seq_id, [(index, prefill.block_bytes(output.exported_blocks[index])) for index in missing])
    decode.scheduler.commit_import(spec.seq_id, [output.token.token_id])
    rest = _finish(decode, [spec.seq_id])[spec.seq_id]

    _assert_same({"x": ([output.token, *rest[0]], rest[1])}, {"x": expected})
    assert _num_accepted(decode) > 0
    prefill.scheduler.release_export(spec.seq_id)
    prefill.check_integrity()


def test_prompt_logprobs_are_the_same(tiny_model: Any) -> None:
    sampling = replace(_GREEDY, prompt_logprobs=2)
    scores = []
    for speculative in (None, _NGRAM):
        engine = _engine(tiny_model(), speculative, max_num_batched_tokens=9)
        for spec in _specs(sampling):
            engine.add(spec)
        outputs = [output for _ in range(400) if engine.scheduler.has_work for output in engine.step()]
        scores.append({output.seq_id: output.prompt_scores for output in outputs if output.prompt_scores is not None})

    assert scores[0] == scores[1]
    expected = {spec.seq_id: len(spec.prompt_token_ids) - 1 for spec in _specs(sampling)}
    assert {seq_id: len(each) for seq_id, each in scores[0].items() if each is not None} == expected


def test_a_request_may_forgo_speculation(tiny_model: Any) -> None:
    engine = _engine(tiny_model(), _NGRAM)

    _run(engine, _specs(replace(_GREEDY, speculative=False)))

    counts = engine.load_now().speculation
    assert counts is not None and counts.num_drafted == 0


def test_abort_at_every_step_leaves_nothing_held(tiny_model: Any) -> None:
    engine = _engine(tiny_model(), _NGRAM, max_num_batched_tokens=24)
    for num_steps in range(14):
        for spec in _specs(_GREEDY):
            engine.add(spec)
        for _ in range(num_steps):
            engine.step()
        for spec in _specs(_GREEDY):
            engine.scheduler.abort(spec.seq_id)
        engine.check_integrity()
        assert engine.pool.usage().in_use == 0
    assert _num_accepted(engine) > 0


def test_drafts_never_make_anybody_give_way(tiny_model: Any) -> None:
    """A pool that holds exactly what two sequences need: they end without preemption, with speculation as without."""
    sampling = replace(_GREEDY, max_tokens=20)
    specs = [SequenceSpec(str(n), (5 + n, 6, 7, 8) * 3, sampling) for n in range(2)]
    engine = _engine(tiny_model(), _NGRAM, num_blocks=16)

    results = _run(engine, specs)

    assert engine.load_now().num_preemptions == 0
    assert results == _run(_engine(tiny_model(), num_blocks=16), specs)


def test_speculated_sampling_follows_the_models_distribution(tiny_model: Any) -> None:
    """Chi-square over 400 seeds at two positions: the first draft's and the one after it.

    The expected counts come from sequences' own logprobs, so that noise and acceptance are tested together.
    """
    engine = _engine(tiny_model(), _NGRAM, num_blocks=1024, max_num_seqs=100, max_num_batched_tokens=2048)
    prompt = (7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8)
    sampling = SamplingParams(
        max_tokens=4, temperature=1.0, top_k=4, seed=0, ignore_eos=True, logprobs=4, allowed_token_ids=(7, 8, 9, 10)
    )
    results = _run(engine, [SequenceSpec(str(n), prompt, replace(sampling, seed=n)) for n in range(400)])

    assert _num_accepted(engine) > 50
    by_history: dict[tuple[int, ...], list[int]] = {}
    for tokens, _ in results.values():
        ids = _ids(tokens)
        for position in (1, 2, 3):
            by_history.setdefault(tuple(ids[:position]), []).append(ids[position])
    judged = {history: drawn for history, drawn in by_history.items() if len(drawn) >= 60}
    assert len(judged) >= 3
    for history, drawn in judged.items():
        expected = _restricted(engine, (*prompt, *history), (7, 8, 9, 10))
        assert _chi_square(Counter(drawn), expected) < 21.1  # 3 degrees of freedom: exceeded once in 10,000


def _restricted(engine: Engine, token_ids: tuple[int, ...], allowed: tuple[int, ...]) -> dict[int, float]:
    """The model's next-token distribution over `allowed`, from prompt logprobs: no sampling involved."""
    logprobs = {}
    for token_id in allowed:
        sampling = SamplingParams(max_tokens=0, prompt_logprobs=0, seed=0)
        engine.add(SequenceSpec("score", (*token_ids, token_id), sampling))
        outputs = [output for _ in range(10) if engine.scheduler.has_work for output in engine.step()]
        assert outputs[-1].prompt_scores is not None
        logprobs[token_id] = outputs[-1].prompt_scores[-1].logprob
    total = sum(map(math.exp, logprobs.values()))
    return {token_id: math.exp(logprob) / total for token_id, logprob in logprobs.items()}


def _chi_square(drawn: Counter[int], expected: dict[int, float]) -> float:
    """Pearson's statistic; tokens expected less than five times are judged together."""
    total = drawn.total()
    rare = [token_id for token_id, share in expected.items() if share * total < 5]
    cells = [(drawn[t], share * total) for t, share in expected.items() if t not in rare]
    cells.append((sum(drawn[t] for t in rare), max(sum(expected[t] for t in rare) * total, 1.0)))
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)


def _ids(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens if token.token_id is not None]
