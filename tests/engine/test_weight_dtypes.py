"""Weights of other dtypes than float32: near the float32 model, and another model to whoever exchanges blocks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.weight_dtype import with_weight_dtype
from pdserve.kernels.cpu import CpuKernels

_PROMPT = tuple(range(3, 60))
_SCORED = SamplingParams(max_tokens=0, temperature=0, seed=0, prompt_logprobs=0)


def _engine(model_dir: Path, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 16}
    return Engine.load(EngineConfig(model_dir=model_dir, **{**defaults, **options}))


def _logprobs(engine: Engine) -> list[float]:
    engine.add(SequenceSpec("a", _PROMPT, _SCORED))
    found: list[float] = []
    while engine.scheduler.has_work:
        for output in engine.step():
            found += [score.logprob for score in output.prompt_scores or ()]
    return found


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {}),
        ("llama", {"hidden_size": 72, "intermediate_size": 100, "tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 24}),
        ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16}),
        ("starcoder2", {}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16}),
    ],
    ids=str,
)
@pytest.mark.parametrize("use_cpu_kernels", [True, False], ids=["compiled", "torch"])
def test_int8_is_near_float32(
    tiny_model: Any, model_type: str, overrides: dict[str, Any], use_cpu_kernels: bool
) -> None:
    model_dir = tiny_model(model_type, **overrides)

    int8 = _logprobs(_engine(model_dir, dtype="int8", use_cpu_kernels=use_cpu_kernels))
    float32 = _logprobs(_engine(model_dir))

    assert len(int8) == len(float32) == len(_PROMPT) - 1
    differences = [abs(one - other) for one, other in zip(int8, float32, strict=True)]
    assert 0 < sum(differences) / len(differences) < 0.1


def test_blocks_of_other_weights_are_another_models(tiny_model: Any) -> None:
    """The digest that both ends of a transfer compare tells the dtypes apart, also where both keep float32 blocks."""
    digests = [_engine(tiny_model(), dtype=dtype, kv_cache_dtype="float32").facts.digest for dtype in _DTYPES]

    assert len(set(digests)) == len(_DTYPES)


_DTYPES = ("float32", "bfloat16", "float16", "int8")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "int8"}, "bfloat16"),
        ({"dtype": "int8", "use_cpu_kernels": False}, "bfloat16"),
        ({"dtype": "int8", "kv_cache_dtype": "float32"}, "float32"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "bfloat16"),
    ],
    ids=str,
)
def test_keys_and_values_are_as_the_computation_and_of_16_bits_beside_int8(
    tiny_model: Any, options: dict[str, Any], expected: str
) -> None:
    assert _engine(tiny_model(), **options).facts.kv_dtype == expected


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"dtype.*int8.*int4"):
        EngineConfig(model_dir=Path(), dtype="int4")


@pytest.mark.skipif(CpuKernels.load(1) is None, reason="the CPU kernels were not built")
@pytest.mark.parametrize(
    ("model_type", "use_cpu_kernels", "expected"),
    [("llama", True, "int8"), ("llama", False, "float32"), ("qwen2", True, "float32"), ("gpt2", True, "float32")],
)
def test_auto_is_int8_only_where_it_is_fast_and_measured(model_type: str, use_cpu_kernels: bool, expected: str) -> None:
    config = EngineConfig(model_dir=Path(), dtype="auto", use_cpu_kernels=use_cpu_kernels)

    assert with_weight_dtype(config, {"model_type": model_type}).dtype == expected
    assert with_weight_dtype(replace(config, dtype="bfloat16"), {"model_type": model_type}).dtype == "bfloat16"
    assert config.resolved_kv_dtype == "float32"


@pytest.mark.skipif(CpuKernels.load(1) is None, reason="the CPU kernels were not built")
def test_auto_is_the_model_that_it_stands_for(tiny_model: Any) -> None:
    chosen, named = (_engine(tiny_model(), dtype=dtype) for dtype in ("auto", "int8"))

    assert chosen.facts == named.facts
    assert _logprobs(chosen) == _logprobs(named)
