"""The whole engine on Triton's kernels, interpreted on tensors of the CPU, against the torch reference.

What a GPU would run: chunks and decode steps, prefix hits, forks with copied blocks, blocks through staging memory.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.errors import InvalidRequest, ModelError
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.model_dir import ModelDir
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import SampledToken
from pdserve.engine.swap_rule import PreemptionMode

pytest.importorskip("triton")
pytestmark = pytest.mark.timeout(300)

_BLOCK_SIZE = 4
_GREEDY = SamplingParams(max_tokens=5, temperature=0.0, seed=0, ignore_eos=True, logprobs=3)
_PROMPT = (7, 31, 5, 88, 12, 40, 9, 63, 27, 4, 51)

Results = dict[str, list[SampledToken]]


def _engine(model_dir: Path, device: str, **options: Any) -> Engine:
    defaults: dict[str, Any] = {
        "block_size": _BLOCK_SIZE,
        "num_blocks": 40,
        "max_num_batched_tokens": 8,
        "use_cpu_kernels": False,
    }
    return Engine.load(EngineConfig(model_dir=model_dir, device=device, **{**defaults, **options}))


def _run(engine: Engine, specs: list[SequenceSpec]) -> Results:
    for spec in specs:
        engine.add(spec)
    return _finish(engine)


def _finish(engine: Engine) -> Results:
    results: Results = {}
    while engine.scheduler.has_work:
        for output in engine.step():
            if output.token is not None:
                results.setdefault(output.seq_id, []).append(output.token)
        engine.check_integrity()
    return results


def _assert_equal(ours: Results, expected: Results, tolerance: float = 1e-4) -> None:
    assert ours.keys() == expected.keys()
    for seq_id, tokens in ours.items():
        assert [token.token_id for token in tokens] == [token.token_id for token in expected[seq_id]]
        for token, other in zip(tokens, expected[seq_id], strict=True):
            assert token.logprob == pytest.approx(other.logprob, abs=tolerance)
            for (_, logprob), (_, other_logprob) in zip(token.top_logprobs, other.top_logprobs, strict=True):
                assert logprob == pytest.approx(other_logprob, abs=tolerance)


@pytest.fixture(scope="module")
def model_dir(tiny_model: Any) -> Path:
    """A model of two layers: an interpreted kernel takes milliseconds a program."""
    path: Path = tiny_model(num_hidden_layers=2, vocab_size=96)
    return path


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_chunks_decoding_and_a_warm_cache_as_the_reference(model_dir: Path, kv_cache_dtype: str) -> None:
    specs = [SequenceSpec("long", _PROMPT, _GREEDY), SequenceSpec("short", _PROMPT[3:6], _GREEDY)]
    ours, reference = (_engine(model_dir, device, kv_cache_dtype=kv_cache_dtype) for device in ("interpreter", "cpu"))

    _assert_equal(_run(ours, specs), _run(reference, specs))
    _assert_equal(_run(ours, specs[:1]), _run(reference, specs[:1]))

    assert ours.tiers.usage()[0].num_hits == reference.tiers.usage()[0].num_hits > 0


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("gemma2", {"head_dim": 16, "sliding_window": 3}),
        ("qwen3_moe", {"head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    ],
)
def test_other_shapes_of_decoder_as_the_reference(tiny_model: Any, model_type: str, options: dict[str, Any]) -> None:
    """Windows, soft caps and norms around; head norms and experts."""
    path = tiny_model(model_type, num_hidden_layers=2, vocab_size=96, **options)
    spec = SequenceSpec("a", _PROMPT[:6], replace(_GREEDY, max_tokens=2))

    ours, expected = (_run(_engine(path, device), [spec]) for device in ("interpreter", "cpu"))

    _assert_equal(ours, expected)


def test_fp8_keys_and_values_are_near_and_half_as_large(model_dir: Path) -> None:
    spec = SequenceSpec("a", _PROMPT[:5], replace(_GREEDY, max_tokens=2))
    fp8, plain = (_engine(model_dir, "interpreter", kv_cache_dtype=dtype) for dtype in ("fp8", "float16"))

    [ours], [expected] = (_run(engine, [spec])["a"][:1] for engine in (fp8, plain))

    assert ours.logprob == pytest.approx(expected.logprob, abs=0.3)
    assert 2 * fp8.tiers.block_bytes == plain.tiers.block_bytes
    assert fp8.facts.kv_dtype == "fp8"


def test_tokens_are_sampled_where_the_logits_lie(model_dir: Path) -> None:
    """What requests do to logits is done there too; rows with logprobs, which the host answers, stand between them."""
    plain = SamplingParams(max_tokens=2, temperature=0.9, seed=7, ignore_eos=True)
    samplings = (
        plain,
        replace(plain, top_k=5, top_p=0.8, repetition_penalty=1.6, frequency_penalty=0.5, seed=8),
        replace(plain, logprobs=2),
        replace(plain, temperature=0.0, logit_bias={40: 50.0}, bad_words_ids=[[40, 40]], min_p=0.1),
        replace(plain, min_tokens=2, stop_token_ids=(9,), allowed_token_ids=(9, 12, 30, 31)),
    )
    specs = [SequenceSpec(str(index), _PROMPT[index : index + 2], each) for index, each in enumerate(samplings)]
    ours, reference = (_engine(model_dir, device, max_num_batched_tokens=32) for device in ("interpreter", "cpu"))

    results = _run(ours, specs)

    expected = _run(reference, specs)
    assert {seq_id: [token.token_id for token in tokens] for seq_id, tokens in results.items()} == {
        seq_id: [token.token_id for token in tokens] for seq_id, tokens in expected.items()
    }
    assert results["3"][0].token_id == 40 != results["3"][1].token_id


def test_what_serving_launches_is_compiled_before_the_first_request(model_dir: Path) -> None:
    """Sampling with edits and without, decoding beside a chunk, moving blocks; a GPU compiles a kernel when it is first
    launched."""
    from pdserve.kernels.triton.block_copy import move_words
    from pdserve.kernels.triton.decode_attention import attend_part, merge_parts
    from pdserve.kernels.triton.prefill_attention import attend_rows
    from pdserve.kernels.triton.sampling import sample_row

    config = EngineConfig(model_dir=model_dir, device="interpreter", num_blocks=4, max_num_batched_tokens=8)
    runner = ModelRunner.load(config, ModelDir.open(model_dir))
    kernels = (sample_row, attend_rows, attend_part, merge_parts, move_words)
    launched: list[tuple[str, bool]] = []
    for kernel in kernels:
        name = kernel.__name__
        kernel.add_pre_run_hook(lambda *_, own=name, **named: launched.append((own, named.get("HAS_EDITS", False))))
    try:
        runner.warm_up(config)
    finally:
        for kernel in kernels:
            kernel.pre_run_hooks.clear()

    assert set(launched) == {(kernel.__name__, False) for kernel in kernels} | {("sample_row", True)}
    assert not runner.kv_cache.layer(0)[1:].any()  # and nobody's block was written


def test_branches_of_one_prompt_copy_their_blocks(model_dir: Path) -> None:
    sampling = replace(_GREEDY, temperature=1.2, max_tokens=4)
    specs = [SequenceSpec(f"b{index}", _PROMPT[:6], sampling.branch(index)) for index in range(3)]
    ours, reference = (_engine(model_dir, device) for device in ("interpreter", "cpu"))

    for engine in (ours, reference):
        engine.add_branches(specs)

    _assert_equal(_finish(ours), _finish(reference))


@pytest.fixture
def dots_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter add products in the order of k, as a GPU does in every row.

    NumPy's BLAS adds them in another order in some rows of a matrix than in others, which rows depends on the
    processor; a sequence lies in other rows of a tile when it is alone.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(self: object, a: Any, b: Any, d: Any, input_precision: object, max_imprecise: object) -> Any:
        total = np.zeros_like(d.data)
        for k in range(a.data.shape[-1]):
            total += a.data[..., k, None].astype(total.dtype) * b.data[..., k, None, :].astype(total.dtype)
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("dots_in_order")
def test_batch_invariant_a_sequence_has_the_same_bits_alone(model_dir: Path) -> None:
    """The neighbour law, to the bit where chunks are the same."""
    sampling = replace(_GREEDY, max_tokens=3)
    specs = [SequenceSpec(str(length), _PROMPT[:length], sampling) for length in (2, 7)]
    options: dict[str, Any] = {"batch_invariant": True, "max_num_batched_tokens": 32, "enable_prefix_cache": False}

    together = _run(_engine(model_dir, "interpreter", **options), specs)

    for spec in specs:
        alone = _run(_engine(model_dir, "interpreter", **options), [spec])
        assert alone[spec.seq_id] == together[spec.seq_id]
    in_chunks = _run(_engine(model_dir, "interpreter", **{**options, "max_num_batched_tokens": 4}), specs)
    _assert_equal(in_chunks, together)


def test_blocks_leave_and_land_through_staging(model_dir: Path) -> None:
    """From a GPU to a CPU and back: both hold the same bytes in a block."""
    spec = SequenceSpec("a", _PROMPT, replace(_GREEDY, max_tokens=3))
    expected = _run(_engine(model_dir, "cpu"), [spec])["a"]

    for devices in (("interpreter", "cpu"), ("cpu", "interpreter")):
        prefill, decode = (_engine(model_dir, device) for device in devices)
        _assert_equal({"a": _split(prefill, decode, spec)}, {"a": expected})
        assert decode.pool.usage().in_use == decode.pool.usage().in_flight == 0


def _split(prefill: Engine, decode: Engine, spec: SequenceSpec) -> list[SampledToken]:
    prefill.add(replace(spec, is_export=True))
    decode.add_import(spec)
    [(_, needed)] = decode.grant_imports()
    while (output := prefill.step()[0]).token is None:
        pass
    table = output.exported_blocks
    size = prefill.tiers.block_bytes
    blocks = {
        first + index: memory[index * size : (index + 1) * size]
        for first, memory in prefill.block_runs(table)
        for index in range(memory.nbytes // size)
    }
    half = size // 2  # the first layer, then the rest
    decode.land(spec.seq_id, [(index, blocks[index][:half]) for index in needed])
    decode.land(spec.seq_id, [(index, blocks[index][half:]) for index in needed], start=half)
    assert output.token is not None and output.token.token_id is not None
    decode.scheduler.commit_import(spec.seq_id, [output.token.token_id])
    prefill.scheduler.abort(spec.seq_id)
    return [output.token, *_finish(decode)[spec.seq_id]]


def test_preempted_blocks_wait_in_host_memory(model_dir: Path) -> None:
    specs = [SequenceSpec(str(index), _PROMPT[index : index + 2], _GREEDY) for index in range(2)]
    options: dict[str, Any] = {
        "block_size": 2,
        "num_blocks": 4,
        "enable_prefix_cache": False,
        "kv_host_memory_bytes": 2**22,
        "preemption_mode": PreemptionMode.SWAP,
        "growth_reserve": 0.0,
        "max_num_batched_tokens": 32,
    }
    ours, reference = _engine(model_dir, "interpreter", **options), _engine(model_dir, "cpu")

    _assert_equal(_run(ours, specs), _run(reference, specs))

    assert ours.load_now().num_swaps > 0


def test_blocks_that_do_not_fit_the_device_are_told(model_dir: Path) -> None:
    with pytest.raises(ModelError, match=f"{2**40} KV blocks do not fit the memory of cpu"):
        _engine(model_dir, "interpreter", num_blocks=2**40)


def test_a_device_that_is_not_there_is_refused_with_a_sentence(model_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match="must be auto, cpu, cuda or cuda:N"):
        EngineConfig(model_dir=model_dir, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidRequest, match="sees no GPU"):
            _engine(model_dir, "cuda")
    with pytest.raises(InvalidRequest, match="fp8 needs a GPU"):
        _engine(model_dir, "cpu", kv_cache_dtype="fp8")
