"""The KV cache in another dtype than the weights: the neighbour law to the bit, hand-over, size and refusals."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.kernels.cpu import CpuKernels

TinyModel = Callable[..., Path]
Answers = dict[str, list[tuple[int, float]]]  # token and its logprob

_SAMPLING = SamplingParams(max_tokens=16, temperature=0.0, seed=0, ignore_eos=True, logprobs=0)
_needs_kernels = pytest.mark.skipif(CpuKernels.load(1) is None, reason="the CPU kernels were not built")


@dataclass(frozen=True)
class _Way:
    """A way to compute the same prompts."""

    options: dict[str, Any]
    is_warm: bool = False


_WAYS = {
    "small chunks": _Way({"max_num_batched_tokens": 5}),
    "one chunk": _Way({"max_num_batched_tokens": 512}),
    "preemption": _Way({"num_blocks": 19, "max_num_seqs": 5}),
    "odd blocks": _Way({"block_size": 7}),
    "large blocks": _Way({"block_size": 32}),
    "warm cache": _Way({}, is_warm=True),
}


def _engine(model_dir: Path, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"block_size": 4, "num_blocks": 256, "max_num_batched_tokens": 64}
    return Engine.load(EngineConfig(model_dir=model_dir, **{**defaults, **options}))


def _specs() -> list[SequenceSpec]:
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(3, 199, (9,), generator=generator).tolist()
    own = [torch.randint(3, 199, (length,), generator=generator).tolist() for length in (1, 4, 17, 40)]
    prompts = [tuple(shared + tokens if index % 2 else tokens) for index, tokens in enumerate(own)]
    return [SequenceSpec(str(index), prompt, _SAMPLING) for index, prompt in enumerate(prompts)]


def _run(engine: Engine, specs: list[SequenceSpec]) -> Answers:
    for spec in specs:
        engine.add(spec)
    answers: Answers = {spec.seq_id: [] for spec in specs}
    while engine.scheduler.has_work:
        for output in engine.step():
            if output.token is not None and output.token.token_id is not None:
                assert output.token.logprob is not None
                answers[output.seq_id].append((output.token.token_id, output.token.logprob))
    return answers


@_needs_kernels
@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16", "float16"])
@pytest.mark.parametrize("way", list(_WAYS))
def test_answers_are_the_same_bits_in_any_company(tiny_model: TinyModel, kv_dtype: str, way: str) -> None:
    model_dir = tiny_model()
    alone: Answers = {}
    for spec in _specs():
        alone |= _run(_engine(model_dir, kv_cache_dtype=kv_dtype), [spec])

    engine = _engine(model_dir, kv_cache_dtype=kv_dtype, **_WAYS[way].options)
    if _WAYS[way].is_warm:
        _run(engine, _specs())
    together = _run(engine, _specs())

    assert together == alone
    engine.scheduler.check_integrity()


@_needs_kernels
@pytest.mark.parametrize("num_emitted", [1, 5])
def test_migration_changes_no_bit(tiny_model: TinyModel, num_emitted: int) -> None:
    """A sequence is computed again elsewhere from its prompt and what it has emitted."""
    model_dir, spec = tiny_model(), _specs()[3]
    whole = _run(_engine(model_dir, kv_cache_dtype="int8"), [spec])[spec.seq_id]
    emitted = tuple(token_id for token_id, _ in whole[:num_emitted])

    moved = SequenceSpec(spec.seq_id, spec.prompt_token_ids, _SAMPLING, output_token_ids=emitted)
    rest = _run(_engine(model_dir, kv_cache_dtype="int8"), [moved])[spec.seq_id]

    assert rest == whole[num_emitted:]


def test_reference_and_kernels_agree(tiny_model: TinyModel) -> None:
    ours = _run(_engine(tiny_model(), kv_cache_dtype="int8"), _specs())
    reference = _run(_engine(tiny_model(), kv_cache_dtype="int8", use_cpu_kernels=False), _specs())

    for seq_id, answer in ours.items():
        assert [logprob for _, logprob in answer[:4]] == pytest.approx(
            [logprob for _, logprob in reference[seq_id][:4]], abs=5e-3
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_cache_of_another_dtype_than_half_precision_weights(tiny_model: TinyModel, dtype: str, kv_dtype: str) -> None:
    plain = _run(_engine(tiny_model(), dtype=dtype), _specs())
    other = _run(_engine(tiny_model(), dtype=dtype, kv_cache_dtype=kv_dtype), _specs())

    for seq_id, answer in plain.items():  # the first token: later ones follow what was chosen
        assert answer[0][1] == pytest.approx(other[seq_id][0][1], abs=0.3)


def test_int8_holds_more_blocks_in_the_same_memory(tiny_model: TinyModel) -> None:
    """A row of 16 values is 64 bytes in float32, and 16 + 4 in int8."""
    memory = {"num_blocks": None, "kv_memory_bytes": 2**20}
    float32 = _engine(tiny_model(), **memory)
    int8 = _engine(tiny_model(), kv_cache_dtype="int8", **memory)

    assert float32.pool.usage().total == 2**20 // (3 * 2 * 2 * 4 * 64)
    assert int8.pool.usage().total == 2**20 // (3 * 2 * 2 * 4 * 20)
    assert (float32.facts.kv_dtype, int8.facts.kv_dtype) == ("float32", "int8")


@pytest.mark.parametrize(("kv_dtype", "part"), [("fp8", "needs a GPU"), ("int4", "must be one of auto, float32")])
def test_a_dtype_that_cannot_be_is_refused_with_a_sentence(tiny_model: TinyModel, kv_dtype: str, part: str) -> None:
    with pytest.raises(InvalidRequest, match=part):
        EngineConfig(model_dir=tiny_model(), device="cpu", kv_cache_dtype=kv_dtype)
