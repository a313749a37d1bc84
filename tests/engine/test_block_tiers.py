"""KV tiers on tiny models: what comes back from host memory and disk changes nothing but the work."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.engine import block_tiers
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.errors import InvalidRequest, ModelError
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import SampledToken, StepOutput
from pdserve.engine.swap_rule import PreemptionMode
from pdserve.engine.tier_moves import Tier, TierUsage

_BLOCK_SIZE = 4
_GREEDY = SamplingParams(max_tokens=24, temperature=0.0, seed=0, ignore_eos=True, logprobs=3)
_SEEDED = SamplingParams(max_tokens=24, temperature=1.2, top_p=0.95, seed=11, ignore_eos=True, logprobs=3)
_SHORT = replace(_GREEDY, max_tokens=2)

Tokens = dict[str, list[SampledToken]]


@pytest.fixture(autouse=True)
def _patience_with_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes is a matter of the machine: a step that gave a read up would compute what the tests count."""
    monkeypatch.setattr(block_tiers, "_DISK_TIMEOUT_S", 600.0)


def _engine(model_dir: Path, host_blocks: int = 0, disk_blocks: int = 0, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"block_size": _BLOCK_SIZE, "num_blocks": 256, "max_num_batched_tokens": 64}
    if host_blocks:
        sizes = {"kv_host_memory_bytes": host_blocks, "kv_disk_bytes": disk_blocks}
        defaults |= {name: number * _block_bytes(model_dir) for name, number in sizes.items()}
    return Engine.load(EngineConfig(model_dir=model_dir, **{**defaults, **options}))


@cache
def _block_bytes(model_dir: Path) -> int:
    engine = Engine.load(EngineConfig(model_dir=model_dir, block_size=_BLOCK_SIZE, num_blocks=1))
    return engine.tiers.block_bytes


def _prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 199, (length,), generator=generator).tolist())


def _specs(sampling: SamplingParams) -> list[SequenceSpec]:
    shared = _prompt(9, 5)
    lengths = (1, 3, 4, 5, 17, 40)
    own = [_prompt(length, 10 + index) for index, length in enumerate(lengths)]
    return [
        SequenceSpec(str(index), shared + tokens if index % 2 else tokens, sampling) for index, tokens in enumerate(own)
    ]


def _run(engine: Engine, specs: list[SequenceSpec]) -> dict[str, list[StepOutput]]:
    for spec in specs:
        engine.add(spec)
    outputs: dict[str, list[StepOutput]] = {spec.seq_id: [] for spec in specs}
    while engine.scheduler.has_work:
        for output in engine.step():
            outputs[output.seq_id].append(output)
        engine.scheduler.check_integrity()
    return outputs


def _tokens(outputs: dict[str, list[StepOutput]]) -> Tokens:
    return {seq_id: [output.token for output in each if output.token] for seq_id, each in outputs.items()}


def _num_cached(engine: Engine, prompt: tuple[int, ...], seq_id: str = "a", salt: str = "") -> int:
    """Run one prompt; return what it reports, after checking it against the tokens that were computed."""
    engine.add(SequenceSpec(seq_id, prompt, _SHORT, salt=salt))
    num_computed, num_cached = 0, None
    while engine.scheduler.has_work:
        batch = engine._next_batch()
        spans = [(span.start, span.start + len(span.token_ids)) for span in batch.spans]
        num_computed += sum(min(end, len(prompt)) - min(start, len(prompt)) for start, end in spans)
        verified, scores = engine._compute(batch)
        for output in engine.scheduler.update(batch, verified.tokens, scores):
            num_cached = output.num_cached_tokens
    assert num_cached == len(prompt) - num_computed
    return num_cached


def _usage(engine: Engine) -> dict[Tier, TierUsage]:
    return {usage.tier: usage for usage in engine.tiers.usage()}


def _push_out(engine: Engine, num_prompts: int = 1, length: int = 60) -> None:
    """Let other prompts take the device."""
    for number in range(num_prompts):
        _run(engine, [SequenceSpec(f"other {number}", _prompt(length, 100 + number), _SHORT)])


@pytest.mark.parametrize("length", [4, 16, 17, 40])
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST, Tier.DISK])
def test_cached_tokens_are_those_not_computed_whatever_the_tier(
    tiny_model: Any, tmp_path: Path, tier: Tier, length: int
) -> None:
    host = {Tier.DEVICE: 64, Tier.HOST: 64, Tier.DISK: 3}[tier]
    engine = _engine(tiny_model(), host, 256, num_blocks=17, kv_disk_dir=tmp_path)
    prompt = _prompt(length)
    assert _num_cached(engine, prompt) == 0
    if tier is not Tier.DEVICE:
        _push_out(engine, 2)

    assert _num_cached(engine, prompt) == (length - 1) // _BLOCK_SIZE * _BLOCK_SIZE
    assert _usage(engine)[tier].num_hits > 0 or length == 4
    engine.close()


@pytest.mark.parametrize(
    ("sampling", "shape"), [(_GREEDY, {}), (_SEEDED, {"num_key_value_heads": 1})], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize(
    ("mode", "host", "disk", "options"),
    [
        (PreemptionMode.SWAP, 40, 0, {}),
        (PreemptionMode.SWAP, 4, 40, {}),
        (PreemptionMode.SWAP, 40, 0, {"enable_prefix_cache": False}),
        (PreemptionMode.RECOMPUTE, 6, 20, {}),
        (PreemptionMode.AUTO, 12, 0, {}),
    ],
    ids=["swap", "swap, small host", "swap alone", "recompute", "auto"],
)
def test_swap_and_tiers_change_no_token_and_no_logprob(
    tiny_model: Any,
    tmp_path: Path,
    sampling: SamplingParams,
    shape: dict[str, Any],
    mode: PreemptionMode,
    host: int,
    disk: int,
    options: dict[str, Any],
) -> None:
    """C131: the neighbour law under preemption."""
    model_dir = tiny_model(**shape)
    alone: Tokens = {}
    for spec in _specs(sampling):
        alone |= _tokens(_run(_engine(model_dir), [spec]))
    directory = tmp_path if disk else None
    engine = _engine(
        model_dir, host, disk, num_blocks=19, max_num_seqs=5, preemption_mode=mode, kv_disk_dir=directory, **options
    )

    for _ in range(2):  # cold, then with whatever the tiers have kept
        assert _tokens(_run(engine, _specs(sampling))) == alone

    load = engine.load_now()
    assert load.num_preemptions > 0
    assert mode is PreemptionMode.AUTO or (load.num_swaps > 0) == (mode is PreemptionMode.SWAP)
    assert load.blocks.in_use == load.blocks.in_flight == 0
    engine.tiers.clear()
    assert engine.pool.usage().free == 19
    assert [usage.num_blocks for usage in engine.tiers.usage()] == [0] * len(engine.tiers.usage())
    engine.close()


def test_swapped_branches_of_one_prompt_give_the_same_tokens(tiny_model: Any) -> None:
    branches = [SequenceSpec(str(n), _prompt(18), replace(_SEEDED, seed=n)) for n in range(5)]
    others = [SequenceSpec(f"other {n}", _prompt(5 + n, n), _GREEDY) for n in range(2)]
    alone: Tokens = {}
    for spec in branches + others:
        alone |= _tokens(_run(_engine(tiny_model()), [spec]))
    engine = _engine(tiny_model(), 40, num_blocks=21, preemption_mode=PreemptionMode.SWAP)

    engine.add_branches(branches)
    for spec in others:
        engine.add(spec)
    outputs: dict[str, list[StepOutput]] = {spec.seq_id: [] for spec in branches + others}
    while engine.scheduler.has_work:
        for output in engine.step():
            outputs[output.seq_id].append(output)
        engine.check_integrity()

    assert engine.load_now().num_swaps > 0
    assert _tokens(outputs) == alone


def test_swapped_sequence_computes_no_token_twice(tiny_model: Any) -> None:
    engine = _engine(tiny_model(), 64, num_blocks=12, preemption_mode=PreemptionMode.SWAP, enable_prefix_cache=False)
    specs = [SequenceSpec(str(number), _prompt(10, number), _GREEDY) for number in range(3)]
    num_computed = 0
    for spec in specs:
        engine.add(spec)
    while engine.scheduler.has_work:
        batch = engine._next_batch()
        num_computed += batch.num_tokens
        engine.scheduler.update(batch, engine._compute(batch)[0].tokens)

    assert engine.load_now().num_swaps > 0
    assert num_computed == 3 * (10 + 24 - 1)


def test_preempted_prompt_counts_only_what_was_never_computed(tiny_model: Any) -> None:
    """Its own blocks are found again after a preemption: they were computed all the same."""
    engine = _engine(tiny_model(), num_blocks=19, max_num_seqs=5)

    outputs = _run(engine, [SequenceSpec(str(n), _prompt(20, n), replace(_GREEDY, max_tokens=20)) for n in range(3)])

    assert engine.load_now().num_preemptions > 0
    assert [each[-1].num_cached_tokens for each in outputs.values()] == [0, 0, 0]


def test_spoiled_host_block_is_computed_again_and_counted(tiny_model: Any) -> None:
    engine = _engine(tiny_model(), 64, num_blocks=17)
    prompt = _prompt(40)
    expected = _tokens(_run(engine, [SequenceSpec("a", prompt, _GREEDY)]))
    _push_out(engine)
    [path] = [engine.scheduler.blocks.tree.touch(prompt, salt) for salt in list(engine.scheduler.blocks.tree._roots)]
    slot = path[3].slot
    assert slot is not None
    engine.tiers._mover._host.bytes_of(slot)[5] ^= 1

    outputs = _run(engine, [SequenceSpec("a", prompt, _GREEDY)])

    assert _tokens(outputs) == expected
    assert outputs["a"][-1].num_cached_tokens == 3 * _BLOCK_SIZE
    assert _usage(engine)[Tier.HOST].num_corrupt == 1


def test_spoiled_swapped_block_is_computed_again_and_counted(tiny_model: Any) -> None:
    specs = [SequenceSpec(str(number), _prompt(10, number), _GREEDY) for number in range(3)]
    options = {"num_blocks": 12, "enable_prefix_cache": False}
    expected = _tokens(_run(_engine(tiny_model(), **options), specs))
    engine = _engine(tiny_model(), 64, preemption_mode=PreemptionMode.SWAP, **options)
    for spec in specs:
        engine.add(spec)
    tokens: Tokens = {spec.seq_id: [] for spec in specs}

    is_spoiled = False
    while engine.scheduler.has_work:
        swapped = [s.swapped for s, _ in engine.scheduler.next_admissions() if s.swapped is not None]
        if swapped and not is_spoiled:
            engine.tiers._mover._host.bytes_of(swapped[0].slots[1])[0] ^= 1
            is_spoiled = True
        for output in engine.step():
            assert output.token is not None or not output.finish_reason
            tokens[output.seq_id] += [output.token] if output.token else []
        engine.scheduler.check_integrity()

    assert is_spoiled and _usage(engine)[Tier.HOST].num_corrupt == 1
    assert tokens == expected


_DAMAGES = {
    "flipped": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"x",
    "header": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "foreign": lambda data: b"not a block" * 100,
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_damaged_file_is_a_miss_and_counted(tiny_model: Any, tmp_path: Path, damage: str) -> None:
    engine = _engine(tiny_model(), 2, 256, num_blocks=17, kv_disk_dir=tmp_path)
    prompt = _prompt(40)
    expected = _tokens(_run(engine, [SequenceSpec("a", prompt, _GREEDY)]))
    _push_out(engine, 2)
    _settle(engine)
    for file in tmp_path.glob("kv-0/*.kv"):
        file.write_bytes(_DAMAGES[damage](file.read_bytes()))

    outputs = _run(engine, [SequenceSpec("a", prompt, _GREEDY)])

    assert _tokens(outputs) == expected
    assert outputs["a"][-1].num_cached_tokens == 0
    assert _usage(engine)[Tier.DISK].num_corrupt > 0
    engine.close()


def _settle(engine: Engine) -> None:
    """Wait until nothing is being written."""
    tree = engine.scheduler.blocks.tree
    while tree._num_disk_jobs:
        engine.tiers._collect(timeout_s=10)


def test_files_survive_a_restart_and_other_models_never_use_them(tiny_model: Any, tmp_path: Path) -> None:
    prompt = _prompt(40)
    options = {"num_blocks": 17, "kv_disk_dir": tmp_path}
    first = _engine(tiny_model(), 2, 256, **options)
    expected = _tokens(_run(first, [SequenceSpec("a", prompt, _GREEDY, salt="tenant")]))
    _push_out(first, 2)
    _settle(first)
    first.close()

    again = _engine(tiny_model(), 16, 256, **options)
    assert _usage(again)[Tier.DISK].num_blocks >= 10
    outputs = _run(again, [SequenceSpec("a", prompt, _GREEDY, salt="tenant")])
    assert _tokens(outputs) == expected
    assert outputs["a"][-1].num_cached_tokens == 36
    assert _num_cached(again, prompt, salt="another tenant") == 0
    again.close()

    other = _engine(tiny_model(num_key_value_heads=1), 16, 256, **options)
    assert _usage(other)[Tier.DISK].num_blocks == 0
    other.close()
    assert list(tmp_path.glob("kv-0/*.kv")) == []


def test_two_engines_share_a_directory_without_sharing_files(tiny_model: Any, tmp_path: Path) -> None:
    engines = [_engine(tiny_model(), 2, 256, num_blocks=17, kv_disk_dir=tmp_path) for _ in range(2)]
    for engine in engines:
        _push_out(engine, 3)
        engine.close()

    assert all(list(tmp_path.glob(f"kv-{number}/*.kv")) for number in range(2))


def test_disk_stays_within_its_size(tiny_model: Any, tmp_path: Path) -> None:
    engine = _engine(tiny_model(), 2, 5, num_blocks=17, kv_disk_dir=tmp_path)
    for number in range(6):
        _run(engine, [SequenceSpec("a", _prompt(40, number), _SHORT)])
        _settle(engine)
        assert len(list(tmp_path.glob("kv-0/*.kv"))) <= 5

    assert _usage(engine)[Tier.DISK].num_blocks == 5
    engine.close()


def test_unwritable_disk_costs_hits_not_answers(tiny_model: Any, tmp_path: Path) -> None:
    engine = _engine(tiny_model(), 2, 64, num_blocks=17, kv_disk_dir=tmp_path)
    (tmp_path / "kv-0" / "block.tmp").mkdir()
    prompt = _prompt(40)
    expected = _tokens(_run(engine, [SequenceSpec("a", prompt, _GREEDY)]))
    _push_out(engine, 2)
    _settle(engine)

    assert _usage(engine)[Tier.DISK].num_blocks == 0
    assert _tokens(_run(engine, [SequenceSpec("a", prompt, _GREEDY)])) == expected
    engine.close()


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_import_counts_host_and_disk_blocks_as_present(tiny_model: Any, tmp_path: Path, tier: Tier) -> None:
    engine = _engine(tiny_model(), 64 if tier is Tier.HOST else 2, 256, num_blocks=17, kv_disk_dir=tmp_path)
    prompt = _prompt(42)
    _run(engine, [SequenceSpec("warm", prompt, _SHORT)])
    _push_out(engine, 2)

    engine.add_import(SequenceSpec("a", prompt, _GREEDY))

    assert engine.grant_imports() == [("a", (10,))]
    assert _usage(engine)[tier].num_hits >= 8
    engine.scheduler.abort("a")
    engine.scheduler.check_integrity()
    engine.close()


def test_disk_without_host_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="kv_host_memory_bytes"):
        EngineConfig(model_dir=tmp_path, kv_disk_dir=tmp_path)


def test_host_memory_below_one_block_is_refused(tiny_model: Any) -> None:
    with pytest.raises(ModelError, match="kv_host_memory_bytes=10 holds no block"):
        _engine(tiny_model(), kv_host_memory_bytes=10)


def test_unusable_directory_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")

    with pytest.raises(ModelError, match="kv_disk_dir"):
        _engine(tiny_model(), 4, 4, kv_disk_dir=file)
