"""The engine on tiny models: the neighbour law, conservation, and the split between two engines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import SampledToken
from pdserve.kernels.cpu import CpuKernels

_BLOCK_SIZE = 4
_GREEDY = SamplingParams(max_tokens=24, temperature=0.0, seed=0, ignore_eos=True)
_SEEDED = SamplingParams(max_tokens=24, temperature=1.2, top_p=0.95, seed=11, ignore_eos=True)
_FEATURES = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": dict.fromkeys(range(40, 60), 3.0) | {50: -100}},
    "allowed": {"allowed_token_ids": tuple(range(20, 90))},
    "bad words": {"bad_words_ids": [[token_id] for token_id in range(3, 90)] + [[100, 101]]},
}

Tokens = dict[str, list[int]]


def _engine(model_dir: Path, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"block_size": _BLOCK_SIZE, "num_blocks": 256, "max_num_batched_tokens": 64}
    return Engine.load(EngineConfig(model_dir=model_dir, **{**defaults, **options}))


def _prompts(count: int = 6) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(3, 199, (9,), generator=generator).tolist()
    lengths = (1, 3, 4, 5, 17, 40)[:count]
    own = [torch.randint(3, 199, (length,), generator=generator).tolist() for length in lengths]
    return [tuple(shared + tokens if index % 2 else tokens) for index, tokens in enumerate(own)]


def _run(engine: Engine, specs: list[SequenceSpec]) -> Tokens:
    for spec in specs:
        engine.add(spec)
    tokens: Tokens = {spec.seq_id: [] for spec in specs}
    while engine.scheduler.has_work:
        for output in engine.step():
            if output.token is not None and output.token.token_id is not None:
                tokens[output.seq_id].append(output.token.token_id)
        engine.scheduler.check_integrity()
    return tokens


def _specs(sampling: SamplingParams) -> list[SequenceSpec]:
    return [SequenceSpec(str(index), prompt, sampling) for index, prompt in enumerate(_prompts())]


@pytest.mark.parametrize("sampling", [_GREEDY, _SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 512},
        {"num_blocks": 19, "max_num_seqs": 5},
        {"max_num_seqs": 1},
        {"block_size": 7},
    ],
    ids=["small chunks", "one chunk", "preemption", "alone", "odd blocks"],
)
def test_tokens_do_not_depend_on_company_chunks_or_pressure(
    tiny_model: Any, options: dict[str, Any], sampling: SamplingParams
) -> None:
    """C051, C052, C057."""
    model_dir = tiny_model()
    alone: Tokens = {}
    for spec in _specs(sampling):
        alone |= _run(_engine(model_dir), [spec])

    engine = _engine(model_dir, **options)
    together = _run(engine, _specs(sampling))

    assert together == alone
    if "num_blocks" in options:
        assert engine.load_now().num_preemptions > 0


@pytest.mark.parametrize("sampling", [_GREEDY, _SEEDED], ids=["greedy", "seeded"])
def test_warm_cache_changes_nothing_but_the_work(tiny_model: Any, sampling: SamplingParams) -> None:
    """C136, C058: prompt lengths around a block's border."""
    engine = _engine(tiny_model())
    base = _prompts()[5] + _prompts()[4]
    specs = [SequenceSpec(str(n), base[:n], sampling) for n in range(10, 40)]
    cold = {spec.seq_id: _run(_engine(tiny_model()), [spec])[spec.seq_id] for spec in specs}

    warm = {spec.seq_id: _run(engine, [spec])[spec.seq_id] for spec in reversed(specs)}

    assert warm == cold


@pytest.mark.parametrize(
    "overrides",
    [
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
        {"hidden_size": 80, "num_attention_heads": 2, "num_key_value_heads": 1},
        {"num_key_value_heads": 1},
    ],
    ids=["three kv heads of nine", "head_dim 40", "one kv head"],
)
def test_greedy_equals_transformers(tiny_model: Any, overrides: dict[str, Any]) -> None:
    model_dir = tiny_model(**overrides)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    expected: Tokens = {}
    for spec in _specs(_GREEDY):
        ids = torch.tensor([spec.prompt_token_ids])
        generated = model.generate(ids, do_sample=False, max_new_tokens=24, min_new_tokens=24, eos_token_id=None)
        expected[spec.seq_id] = generated[0, len(spec.prompt_token_ids) :].tolist()

    assert _run(_engine(model_dir), _specs(_GREEDY)) == expected


@pytest.mark.parametrize("sampling", [_GREEDY, _SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("warm", [False, True])
def test_split_between_two_engines_equals_one(tiny_model: Any, sampling: SamplingParams, warm: bool) -> None:
    model_dir = tiny_model()
    prefill, decode = _engine(model_dir, max_num_batched_tokens=6), _engine(model_dir)
    if warm:
        _run(decode, _specs(sampling))
    split: Tokens = {}
    for spec in _specs(sampling):
        split[spec.seq_id] = _split(prefill, decode, spec)

    assert split == _run(_engine(model_dir), _specs(sampling))
    for engine in (prefill, decode):
        engine.scheduler.check_integrity()
        assert engine.pool.usage().in_use == engine.pool.usage().in_flight == 0


def _split(prefill: Engine, decode: Engine, spec: SequenceSpec) -> list[int]:
    return [token.token_id for token in _split_tokens(prefill, decode, spec) if token.token_id is not None]


def _split_tokens(prefill: Engine, decode: Engine, spec: SequenceSpec) -> list[SampledToken]:
    prefill.add(replace(spec, is_export=True))
    decode.add_import(spec)
    [(_, needed)] = decode.scheduler.grant_imports()
    while (output := prefill.step()[0]).token is None:
        pass
    assert output.token is not None and output.token.token_id is not None
    table = output.exported_blocks
    decode.land(spec.seq_id, [(index, prefill.block_bytes(table[index])) for index in needed])
    decode.scheduler.commit_import(spec.seq_id, [output.token.token_id])
    prefill.scheduler.abort(spec.seq_id)
    tokens = [output.token]
    while decode.scheduler.has_work:
        for step in decode.step():
            assert step.token is not None and step.token.token_id is not None
            tokens.append(step.token)
    return tokens


@pytest.mark.parametrize("cut", [1, 7, 23])
@pytest.mark.parametrize("sampling", [_GREEDY, _SEEDED], ids=["greedy", "seeded"])
def test_sequence_goes_on_elsewhere_from_any_token(tiny_model: Any, sampling: SamplingParams, cut: int) -> None:
    model_dir = tiny_model()
    spec = _specs(sampling)[3]
    whole = _run(_engine(model_dir), [spec])[spec.seq_id]

    moved = SequenceSpec("moved", spec.prompt_token_ids, sampling, output_token_ids=tuple(whole[:cut]))

    assert whole[:cut] + _run(_engine(model_dir), [moved])["moved"] == whole


@pytest.mark.parametrize("name", _FEATURES)
def test_what_changes_logits_holds_over_split_and_migration(tiny_model: Any, name: str) -> None:
    """C052: the first token is sampled elsewhere than the second, the tenth elsewhere: all see the same history."""
    plain = replace(_SEEDED, temperature=0.2, max_tokens=40)  # cool enough to repeat itself
    model_dir, sampling = tiny_model(), replace(plain, **_FEATURES[name])
    spec = _specs(sampling)[4]
    whole = _run(_engine(model_dir), [spec])[spec.seq_id]

    split = _split(_engine(model_dir, max_num_batched_tokens=6), _engine(model_dir), spec)
    moved = SequenceSpec("moved", spec.prompt_token_ids, sampling, output_token_ids=tuple(whole[:10]))
    rest = _split(_engine(model_dir), _engine(model_dir), moved)

    assert whole != _run(_engine(model_dir), [_specs(plain)[4]])[spec.seq_id], "it changes something"
    assert split == whole
    assert whole[:10] + rest == whole


def test_first_token_counts_where_the_second_is_sampled(tiny_model: Any) -> None:
    """C138, C139: `min_tokens` beyond what the prefill node makes, penalties and logprobs, as if nothing were split."""
    plain = replace(_SEEDED, temperature=0.2, ignore_eos=False, frequency_penalty=1.0, logprobs=2)
    spec = _specs(plain)[4]
    early = _run(_engine(tiny_model()), [spec])[spec.seq_id][2]
    stops = replace(plain, min_tokens=12, stop_token_ids=(early,))
    spec = replace(spec, sampling=stops)
    whole = _sampled(_engine(tiny_model()), [spec])[spec.seq_id]

    split = _split_tokens(_engine(tiny_model(), max_num_batched_tokens=6), _engine(tiny_model()), spec)

    assert len(whole) >= 12
    assert [token.token_id for token in split] == [token.token_id for token in whole]
    for ours, theirs in zip(split, whole, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("logit_bias", {"logit_bias": {199: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": [5, 199]}),
        ("bad_words", {"bad_words_ids": [[5, 199]]}),
    ],
)
def test_ids_of_sampling_outside_the_vocabulary_are_refused(
    tiny_model: Any, field: str, changes: dict[str, Any]
) -> None:
    """C059."""
    with pytest.raises(InvalidRequest) as caught:
        _engine(tiny_model()).add(SequenceSpec("a", (5, 6), replace(_GREEDY, **changes)))

    assert caught.value.field == field


def test_without_prefix_cache_nothing_is_shared_or_kept(tiny_model: Any) -> None:
    engine = _engine(tiny_model(), enable_prefix_cache=False)
    spec = _specs(_GREEDY)[5]

    first = _run(engine, [spec])
    engine.add(spec)

    assert engine.step()[0].num_cached_tokens == 0
    engine.scheduler.abort(spec.seq_id)
    assert engine.pool.usage().free == engine.pool.usage().total
    assert first == _run(_engine(tiny_model()), [spec])


@pytest.mark.parametrize("use_cpu_kernels", [True, False], ids=["compiled", "torch"])
def test_compiled_kernels_and_reference_give_the_same_tokens(tiny_model: Any, use_cpu_kernels: bool) -> None:
    engine = _engine(tiny_model(), use_cpu_kernels=use_cpu_kernels)

    assert _run(engine, _specs(_SEEDED)) == _run(_engine(tiny_model()), _specs(_SEEDED))


def test_abort_at_every_step_leaves_nothing_held(tiny_model: Any) -> None:
    engine = _engine(tiny_model(), max_num_batched_tokens=8)
    for num_steps in range(12):
        for spec in _specs(_GREEDY):
            engine.add(spec)
        for _ in range(num_steps):
            engine.step()
        for spec in _specs(_GREEDY):
            engine.scheduler.abort(spec.seq_id)
        engine.scheduler.check_integrity()
        assert engine.pool.usage().in_use == 0


@pytest.mark.parametrize("token_id", [-1, 199, 2**40])
def test_ids_outside_the_vocabulary_are_refused_and_neighbours_unharmed(tiny_model: Any, token_id: int) -> None:
    """C041, C110."""
    engine = _engine(tiny_model())
    engine.add(SequenceSpec("neighbour", (5, 6), _GREEDY))

    with pytest.raises(InvalidRequest):
        engine.add(SequenceSpec("bad", (5, token_id), _GREEDY))

    while engine.scheduler.has_work:
        engine.step()


def test_tenants_share_no_blocks(tiny_model: Any) -> None:
    """C132: a salt that looks like another field's value is still another salt."""
    engine = _engine(tiny_model())
    prompt = _prompts()[5]
    cached = []
    for number, salt in enumerate(["", "a", "a", "1:a", "rope-length:40"]):
        engine.add(SequenceSpec(str(number), prompt, _GREEDY, salt=salt))
        cached.append(engine.step()[0].num_cached_tokens)
        while engine.scheduler.has_work:
            engine.step()

    assert [count > 0 for count in cached] == [False, False, True, False, False]


@pytest.mark.skipif(CpuKernels.load(1) is None, reason="the CPU kernels were not built")
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 512},
        {"num_blocks": 19, "max_num_seqs": 5},
        {"block_size": 7, "num_threads": 3},
    ],
    ids=["small chunks", "one chunk", "preemption", "other blocks and threads"],
)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_compiled_kernels_give_the_same_bits_in_any_company(
    tiny_model: Any, options: dict[str, Any], dtype: str
) -> None:
    """The neighbour law without a tolerance: tokens and logprobs are equal as floats."""
    sampling = replace(_SEEDED, logprobs=5)
    model_dir = tiny_model()
    alone = {}
    for spec in _specs(sampling):
        alone |= _sampled(_engine(model_dir, dtype=dtype), [spec])

    assert _sampled(_engine(model_dir, dtype=dtype, **options), _specs(sampling)) == alone


def _sampled(engine: Engine, specs: list[SequenceSpec]) -> dict[str, list[SampledToken]]:
    for spec in specs:
        engine.add(spec)
    tokens: dict[str, list[SampledToken]] = {spec.seq_id: [] for spec in specs}
    while engine.scheduler.has_work:
        for output in engine.step():
            if output.token is not None:
                tokens[output.seq_id].append(output.token)
    return tokens


def test_the_prefill_rate_is_learnt_from_prompts_not_from_a_few_tokens(tiny_model: Any) -> None:
    engine = Engine.load(EngineConfig(model_dir=tiny_model(), block_size=8, num_blocks=64))

    for length, is_measured in ((8, False), (31, False), (64, True)):
        engine.add(SequenceSpec(str(length), tuple(range(3, 3 + length)), SamplingParams(max_tokens=1, seed=0)))
        engine.step()

        assert (engine.load_now().prefill_tokens_per_s is not None) is is_measured
