"""The engine on a real GPU against the torch reference on the CPU: pytest -m gpu, which hides no GPU."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import SampledToken

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and pytest -m gpu, which hides none"),
]

_GREEDY = SamplingParams(max_tokens=40, temperature=0.0, seed=0, ignore_eos=True, logprobs=3)
_BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "kernels.py"

Results = dict[str, list[SampledToken]]


def _engine(model_dir: Path, device: str, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"num_blocks": 200, "max_num_batched_tokens": 64, "use_cpu_kernels": False}
    return Engine.load(EngineConfig(model_dir=model_dir, device=device, **{**defaults, **options}))


def _specs() -> list[SequenceSpec]:
    generator = torch.Generator().manual_seed(5)
    lengths = (1, 2, 17, 40, 90, 150)
    prompts = [tuple(torch.randint(3, 199, (length,), generator=generator).tolist()) for length in lengths]
    return [SequenceSpec(str(index), prompt, _GREEDY) for index, prompt in enumerate(prompts)]


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


def _assert_near(ours: Results, expected: Results, tolerance: float) -> None:
    """Tokens are equal up to a near tie, after which each goes its own way; logprobs until there are near."""
    for seq_id, tokens in ours.items():
        for index, (token, other) in enumerate(zip(tokens, expected[seq_id], strict=True)):
            assert token.logprob == pytest.approx(other.logprob, abs=tolerance), (seq_id, index)
            if token.token_id != other.token_id:
                (_, best), (_, second), *_ = other.top_logprobs
                assert best - second < 2 * tolerance, (seq_id, index)
                break


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_the_engine_is_that_of_the_reference(tiny_model: Any, kv_cache_dtype: str, enforce_eager: bool) -> None:
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": kv_cache_dtype}
    gpu = _engine(tiny_model(), "cuda", enforce_eager=enforce_eager, **options)
    expected = _run(_engine(tiny_model(), "cpu", **options), _specs())

    cold = _run(gpu, _specs())
    warm = _run(gpu, _specs())

    _assert_near(cold, expected, 2e-3)
    _assert_near(warm, expected, 2e-3)


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [("bfloat16", "auto"), ("bfloat16", "fp8"), ("int8", "auto")])
def test_narrow_weights_and_caches_are_near(tiny_model: Any, dtype: str, kv_cache_dtype: str) -> None:
    first = [replace(spec, sampling=replace(_GREEDY, max_tokens=1)) for spec in _specs()]
    expected = _run(_engine(tiny_model(), "cpu", dtype="float32"), first)

    ours = _run(_engine(tiny_model(), "cuda", dtype=dtype, kv_cache_dtype=kv_cache_dtype), first)

    for seq_id, [token] in ours.items():
        assert token.top_logprobs[0][1] == pytest.approx(expected[seq_id][0].top_logprobs[0][1], abs=0.5)


@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_blocks_go_from_one_device_to_another(tiny_model: Any, devices: tuple[str, str]) -> None:
    prefill, decode = (_engine(tiny_model(), device, dtype="float32") for device in devices)
    spec = _specs()[4]
    prefill.add(replace(spec, is_export=True))
    decode.add_import(spec)
    [(_, needed)] = decode.grant_imports()
    while (output := prefill.step()[0]).token is None:
        pass
    table = output.exported_blocks

    decode.land(spec.seq_id, [(index, prefill.block_bytes(table[index])) for index in needed])

    assert output.token is not None and output.token.token_id is not None
    decode.scheduler.commit_import(spec.seq_id, [output.token.token_id])
    prefill.scheduler.abort(spec.seq_id)
    expected = _run(_engine(tiny_model(), "cpu", dtype="float32"), [spec])
    _assert_near({spec.seq_id: [output.token, *_finish(decode)[spec.seq_id]]}, expected, 2e-3)


def test_batch_invariant_a_sequence_has_the_same_bits_alone(tiny_model: Any) -> None:
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "batch_invariant": True,
        "max_num_batched_tokens": 1024,
        "enable_prefix_cache": False,
    }

    together = _run(_engine(tiny_model(), "cuda", **options), _specs())

    for spec in _specs():
        assert _run(_engine(tiny_model(), "cuda", **options), [spec])[spec.seq_id] == together[spec.seq_id]


def test_the_pool_is_what_the_utilization_leaves(tiny_model: Any) -> None:
    _, total = torch.cuda.mem_get_info()
    engine = _engine(tiny_model(), "cuda", num_blocks=None, gpu_memory_utilization=0.2)

    pool_bytes = engine.pool.usage().total * engine.tiers.block_bytes

    assert 0.05 * total < pool_bytes < 0.2 * total


def test_the_benchmark_measures_every_kernel() -> None:
    result = subprocess.run([sys.executable, str(_BENCHMARK)], capture_output=True, text=True, timeout=500, check=False)

    assert result.returncode == 0, result.stderr
    assert result.stdout.count("% of ") >= 20
