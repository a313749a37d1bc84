"""Decode steps by bucket: which bucket, what is padding, and the same logits as a step that is not padded.

Capturing itself needs a GPU; here a replay computes anew, from the same tensors, or on torch's meta device, whose
values nobody can read.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pdserve.engine.block_pool import BlockId
from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.model_input import ModelInput
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.decoder import Decoder, build_rotary
from pdserve.engine.models.decoder_config import DecoderConfig
from pdserve.engine.models.model_dir import ModelDir
from pdserve.engine.models.weights import WeightFiles, load_decoder_weights
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduled_batch import ScheduledBatch, ScheduledSpan
from pdserve.kernels.operations import choose_operations

pytest.importorskip("triton")
from pdserve.engine.cuda_graphs import Bucket, BucketInput, DecodeGraphs, all_buckets, bucket_of

pytestmark = pytest.mark.timeout(300)

_BLOCK_SIZE = 4
_GREEDY = SamplingParams(temperature=0.0, seed=0)


def _span(seq_id: str, start: int, token_ids: tuple[int, ...], block_table: tuple[int, ...]) -> ScheduledSpan:
    table = tuple(BlockId(block_id) for block_id in block_table)
    return ScheduledSpan(seq_id, start, token_ids, start, table, _GREEDY, 0)


def _step(*spans: ScheduledSpan) -> ModelInput:
    return ModelInput.build(ScheduledBatch(spans), _BLOCK_SIZE)


_DECODE = _step(_span("a", 5, (7,), (3, 1)), _span("b", 0, (9,), (4,)), _span("c", 8, (2,), (0, 6, 5)))


def test_buckets_cover_every_size_up_to_the_limits() -> None:
    buckets = all_buckets(max_num_seqs=20, max_model_len=4096)

    assert {bucket.num_seqs for bucket in buckets} == {1, 2, 4, 8, 16, 20}
    assert [bucket.context_len for bucket in buckets] == sorted(bucket.context_len for bucket in buckets)
    assert {bucket.context_len for bucket in buckets} == {2048, 4096}
    assert all_buckets(1000, 100)[-1] == Bucket(100, 256)


@pytest.mark.parametrize(
    ("num_seqs", "context_len", "expected"),
    [(3, 100, Bucket(2048, 4)), (3, 2049, Bucket(4096, 4)), (17, 9, Bucket(2048, 20)), (21, 9, None), (1, 5000, None)],
)
def test_the_smallest_bucket_that_holds_the_step(num_seqs: int, context_len: int, expected: Bucket | None) -> None:
    table = tuple(range(-(-context_len // _BLOCK_SIZE)))
    step = _step(*(_span(str(index), context_len - 1, (1,), table) for index in range(num_seqs)))

    assert bucket_of(step, all_buckets(20, 4096), None) == expected


def test_what_is_no_plain_decode_step_has_no_bucket() -> None:
    buckets = all_buckets(20, 4096)

    assert bucket_of(_step(_span("a", 0, (1, 2), (0,))), buckets, None) is None
    assert bucket_of(_DECODE, buckets, rope_limit=8) is None
    assert bucket_of(_DECODE, buckets, rope_limit=9) == Bucket(2048, 4)


def test_a_smaller_step_leaves_nothing_of_the_one_before() -> None:
    bucket_input = BucketInput(Bucket(16, 4), _BLOCK_SIZE, torch.device("cpu"))
    bucket_input.fill(_DECODE)
    bucket_input.fill(_step(_span("d", 2, (11,), (7,))))

    filled = bucket_input.model_input
    assert filled.token_ids.tolist() == [11, 0, 0, 0]
    assert filled.positions.tolist() == [2, 0, 0, 0]
    assert filled.slot_mapping.tolist() == [7 * _BLOCK_SIZE + 2, -1, -1, -1]
    assert filled.layout.decode.context_lens.tolist() == [3, 0, 0, 0]
    assert filled.layout.decode.block_tables[0, 0] == 7


def _runner(model_dir: Path, **options: Any) -> ModelRunner:
    config = EngineConfig(
        model_dir=model_dir,
        device="interpreter",
        block_size=_BLOCK_SIZE,
        num_blocks=8,
        max_model_len=64,
        max_num_seqs=4,
        **options,
    )
    return ModelRunner.load(config, ModelDir.open(model_dir))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_padded_step_is_the_step_itself(tiny_model: Any, kv_cache_dtype: str) -> None:
    model_dir = tiny_model("qwen3", num_hidden_layers=2, vocab_size=96, head_dim=24)
    runners = [_runner(model_dir, kv_cache_dtype=kv_cache_dtype, enforce_eager=eager) for eager in (False, True)]
    prompts = _step(
        _span("a", 0, (5, 6, 7, 8, 9), (3, 1)),
        _span("c", 0, (1, 2, 3, 4, 5, 6, 7, 8), (0, 6)),
        _span("b", 0, (3,), (4,)),
    )

    for step in (prompts, _DECODE, _step(_span("b", 1, (9,), (4,)), _span("a", 6, (30,), (3, 1)))):
        replayed, eager = (runner.run(step) for runner in runners)
        torch.testing.assert_close(replayed, eager, atol=1e-5, rtol=1e-5)

    for block_id in (0, 1, 3, 4, 5, 6):  # and nothing but the steps' own slots was written
        ours, expected = (runner.kv_cache.layer(1)[block_id].float() for runner in runners)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    assert not any(bool(runner.kv_cache.layer(1)[block_id].float().any()) for runner in runners for block_id in (2, 7))


class _HostTensors(TorchDispatchMode):
    """Records the operations that are given or make a tensor on the host; one number alone is none."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_operations += 1
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        if any(each.device.type == "cpu" and each.dim() for each in tensors):
            self.names.append(str(func))
        return result


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("qwen3", {"head_dim": 24}),
        ("gemma2", {"head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 3.0}),
        ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 4.0}),
        ("starcoder2", {"sliding_window": 8}),
    ],
)
def test_what_is_captured_neither_waits_for_the_device_nor_gives_it_anything(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, model_type: str, options: dict[str, Any]
) -> None:
    launcher = "triton.runtime.interpreter.InterpretedFunction.run"
    monkeypatch.setattr(launcher, lambda *_, **__: None)  # there is nothing to launch on
    device, dtype = torch.device("meta"), torch.bfloat16
    model_dir = ModelDir.open(tiny_model(model_type, **options))
    shape = DecoderConfig.from_config(model_dir.config)
    operations = choose_operations("bfloat16", 1, use_cpu_kernels=False, triton_device=device)
    weights = load_decoder_weights(WeightFiles.open(model_dir.path), shape, dtype, None, operations, device)
    decoder = Decoder(shape, weights, build_rotary(shape, 64, device), operations)
    size = (8, shape.num_layers, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim)
    recorded = _HostTensors()

    def capture(compute: Any) -> Any:
        with recorded:
            compute()
        return compute

    kv_cache = KVCache.allocate_on(device, *size, dtype)
    with torch.inference_mode():
        DecodeGraphs(decoder, kv_cache, all_buckets(4, 64), _BLOCK_SIZE, device, capture).capture_all()

    assert recorded.num_operations > 100
    assert recorded.names == []
