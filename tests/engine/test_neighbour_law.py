"""The neighbour law as a matrix: models by circumstances.

Greedy and seeded requests have the same tokens and logprobs alone and in a batch of 16, in chunks of any size, from a
cold or a warm cache, after preemption, swap and migration, and with speculation.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import SampledToken, TokenScore
from pdserve.engine.swap_rule import PreemptionMode
from pdserve.engine.tokenizer import Tokenizer
from pdserve.kernels.cpu import CpuKernels

pytestmark = pytest.mark.timeout(300)  # the first test of a model waits for what each request gives alone

_NUM_TOKENS = 9
_GREEDY = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, seed=0, ignore_eos=True, logprobs=2)
_SEEDED = SamplingParams(max_tokens=_NUM_TOKENS, temperature=1.1, top_p=0.95, seed=11, ignore_eos=True, logprobs=2)
_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 31, 33, 48, 65)  # around the borders of blocks, chunks and windows
_FEW_IDS = (2, *range(50, 57))  # random models repeat themselves little; of few tokens, some follow one another again
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
_TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 8}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 24, **_EXPERTS}),
}
_REAL = ("demo float32", "demo int8")
_TEXT = (
    "The river rises in the hills to the north and runs through three towns before it reaches the sea. In the first "
    "town there is a mill, in the second a market, in the third a harbour with forty boats. The river rises in "
    "the hills to the north and runs through three"
)

Results = dict[str, list[SampledToken]]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, 16 requests to it, and what each gives alone on a cold engine."""

    model_dir: Path
    options: dict[str, Any]
    specs: tuple[SequenceSpec, ...]
    alone: Results = field(default_factory=dict)

    def engine(self, **options: Any) -> Engine:
        defaults: dict[str, Any] = {"block_size": 8, "num_blocks": 300, "max_num_batched_tokens": 128}
        return Engine.load(EngineConfig(model_dir=self.model_dir, **{**defaults, **self.options, **options}))


@pytest.fixture(scope="module", params=[*_TINY, *(pytest.param(name, marks=pytest.mark.slow) for name in _REAL)])
def subject(request: pytest.FixtureRequest, tiny_model: Any) -> Iterator[Subject]:
    if request.param in _REAL:
        model_dir = request.getfixturevalue("demo_model_dir")
        ids = Tokenizer.load(model_dir).encode(_TEXT)
        prompts = [tuple(ids[:length]) for length in _LENGTHS]
        made = Subject(model_dir, {"dtype": request.param.split()[1]}, tuple(_specs(prompts)))
    else:
        model_type, overrides = _TINY[request.param]
        generator = torch.Generator().manual_seed(3)
        # Half of each prompt twice, the first half common to all: something to look up, and something to share.
        ids = torch.randint(3, 199, (40,), generator=generator).tolist()
        prompts = [tuple((ids[: -(-length // 2)] * 2)[:length]) for length in _LENGTHS]
        made = Subject(tiny_model(model_type, **overrides), {}, tuple(_specs(prompts, allowed_token_ids=_FEW_IDS)))
    engine = made.engine(max_num_seqs=1, enable_prefix_cache=False)
    for spec in made.specs:
        made.alone.update(_run(engine, [spec]))
    yield made
    engine.close()


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_in_a_batch_of_16_in_any_chunks_cold_and_warm(subject: Subject, chunk: int) -> None:
    """C057, C058."""
    engine = subject.engine(max_num_batched_tokens=chunk, max_num_seqs=16)

    cold = _run(engine, list(subject.specs))
    num_cached: list[int] = []
    warm = _run(engine, list(reversed(subject.specs)), num_cached)

    _assert_equal(cold, subject.alone)
    _assert_equal(warm, subject.alone)
    assert max(num_cached) == (len(subject.specs[-1].prompt_token_ids) - 1) // 8 * 8


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_after_preemption(subject: Subject, mode: PreemptionMode) -> None:
    engine = subject.engine(
        block_size=4,
        num_blocks=23,
        enable_prefix_cache=mode is PreemptionMode.RECOMPUTE,
        max_num_seqs=8,
        preemption_mode=mode,
        kv_host_memory_bytes=2**26 if mode is PreemptionMode.SWAP else 0,
        growth_reserve=0.0,
    )

    results = _run(engine, list(subject.specs))

    _assert_equal(results, subject.alone)
    load = engine.load_now()
    assert load.num_preemptions > 0
    assert (load.num_swaps > 0) is (mode is PreemptionMode.SWAP)


def test_after_migration_at_any_token(subject: Subject) -> None:
    engine = subject.engine()
    moved = []
    for index, spec in enumerate(subject.specs[-_NUM_TOKENS:]):
        for cut in {1 + index % (_NUM_TOKENS - 1), 1 + (index + 5) % (_NUM_TOKENS - 1)}:
            done = tuple(token.token_id for token in subject.alone[spec.seq_id][:cut] if token.token_id is not None)
            moved.append(replace(spec, seq_id=f"{spec.seq_id}@{cut}", output_token_ids=done))

    results = _run(engine, moved)

    for seq_id, tokens in results.items():
        origin, _, cut = seq_id.partition("@")
        _assert_equal({origin: tokens}, {origin: subject.alone[origin][int(cut) :]})


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_with_speculation(subject: Subject, method: str) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    # The model drafts for itself: what it drafts is accepted where it was given the same tokens.
    config |= {"prompt_lookup_min": 1} if method == "ngram" else {"model": str(subject.model_dir)}
    engine = subject.engine(speculative_config=config)

    results = _run(engine, list(subject.specs))

    _assert_equal(results, subject.alone)
    counts = engine.load_now().speculation
    assert counts is not None and 0 < counts.num_accepted <= counts.num_drafted


def test_a_text_is_scored_as_it_was_sampled(subject: Subject) -> None:
    engine = subject.engine(max_num_batched_tokens=64)
    specs = []
    for spec in subject.specs[-4:]:
        text = spec.prompt_token_ids + tuple(token.token_id or 0 for token in subject.alone[spec.seq_id])
        specs.append(SequenceSpec(spec.seq_id, text, SamplingParams(max_tokens=0, seed=0, prompt_logprobs=2)))

    scores = _prompt_scores(engine, specs)

    for seq_id, each in scores.items():
        sampled = subject.alone[seq_id]
        assert len(sampled) == _NUM_TOKENS
        for score, token in zip(each[-_NUM_TOKENS:], sampled, strict=True):
            assert score.logprob == pytest.approx(token.logprob, rel=0, abs=0 if CpuKernels.load(1) else 1e-4)


def _prompt_scores(engine: Engine, specs: list[SequenceSpec]) -> dict[str, tuple[TokenScore, ...]]:
    for spec in specs:
        engine.add(spec)
    scores = {}
    while engine.scheduler.has_work:
        for output in engine.step():
            if output.prompt_scores is not None:
                scores[output.seq_id] = output.prompt_scores
    assert scores.keys() == {spec.seq_id for spec in specs}
    return scores


def _specs(prompts: list[tuple[int, ...]], **changes: Any) -> Iterator[SequenceSpec]:
    for index, prompt in enumerate(prompts):
        yield SequenceSpec(f"{index}", prompt, replace(_SEEDED if index % 2 else _GREEDY, **changes))


def _run(engine: Engine, specs: list[SequenceSpec], num_cached: list[int] | None = None) -> Results:
    for spec in specs:
        engine.add(spec)
    results: Results = {spec.seq_id: [] for spec in specs}
    while engine.scheduler.has_work:
        for output in engine.step():
            assert output.failure is None
            if output.token is not None:
                results[output.seq_id].append(output.token)
                if num_cached is not None:
                    num_cached.append(output.num_cached_tokens)
    engine.check_integrity()
    return results


def _assert_equal(results: Results, expected: Results) -> None:
    """As floats with the compiled kernels; without them equal tokens, and logprobs to 1e-4."""
    if CpuKernels.load(1) is not None:
        assert results == expected
        return
    assert results.keys() == expected.keys()
    for seq_id, tokens in expected.items():
        assert [token.token_id for token in results[seq_id]] == [token.token_id for token in tokens]
        for ours, theirs in zip(results[seq_id], tokens, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
