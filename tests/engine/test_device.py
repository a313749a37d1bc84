"""Where the engine computes, and how much of a GPU's memory is for KV blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.engine.config import EngineConfig
from pdserve.engine.device import DeviceMemory, Place, block_memory, check_launcher, on_device
from pdserve.engine.errors import InvalidRequest, ModelError
from pdserve.engine.model_runner import graph_bytes
from pdserve.engine.models.decoder_config import DecoderConfig
from pdserve.engine.models.model_dir import ModelDir

_GIB = 2**30


def _config(**options: object) -> EngineConfig:
    return EngineConfig(model_dir=Path("model"), **options)  # type: ignore[arg-type]  # of any test


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which auto takes")
def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    config = on_device(_config(dtype="int8"))

    assert config.device == "cpu"
    assert config.compute_dtype == "float32"
    assert Place.of("auto") == Place(torch.device("cpu"), uses_triton=False)


def test_a_name_finds_its_place_again() -> None:
    pytest.importorskip("triton")

    for name in ("cpu", "interpreter"):
        assert Place.of(name).name == name
    assert Place(torch.device("cuda", 1), uses_triton=True).name == "cuda:1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which triton launches")
def test_what_triton_needs_to_launch_kernels_is_told() -> None:
    pytest.importorskip("triton")

    with pytest.raises(InvalidRequest, match=r"'cuda:0': triton cannot build .* a C compiler and Python's headers"):
        check_launcher("cuda:0")


def test_8_bit_weights_compute_in_bfloat16_on_a_gpu() -> None:
    assert _config(device="cuda:0", dtype="int8").compute_dtype == "bfloat16"
    assert _config(device="cuda:0", dtype="int8").resolved_kv_dtype == "bfloat16"
    assert _config(device="cuda:0", dtype="float16").resolved_kv_dtype == "float16"


@pytest.mark.parametrize(
    ("free_gib", "utilization", "expected_gib"),
    [
        (60, 0.5, 40 - 21),  # the share, less the most that was held
        (60, 0.9, 72 - 21),
        (10, 0.9, 10 - 5),  # others hold the rest: what is free, less what a step needs again
    ],
)
def test_blocks_get_the_share_less_weights_and_a_step(free_gib: int, utilization: float, expected_gib: int) -> None:
    memory = DeviceMemory(total=80 * _GIB, free=free_gib * _GIB, held=16 * _GIB, peak=21 * _GIB)

    assert memory.for_blocks(utilization) == expected_gib * _GIB
    config = _config(device="cuda:0", gpu_memory_utilization=utilization)
    assert block_memory(config, memory, reserved=2 * _GIB) == (expected_gib - 2) * _GIB


def test_graphs_with_parts_of_a_fixed_size_keep_more(tiny_model: Any) -> None:
    shape = DecoderConfig.from_config(ModelDir.open(tiny_model()).config)
    usual, invariant = (
        graph_bytes(_config(device="cuda:0", max_num_seqs=8, batch_invariant=flag), shape, 5120)
        for flag in (False, True)
    )

    parts = 8 * 4 * 10 * 16 * 4  # sequences, heads, parts, values, bytes
    assert invariant - usual == 2 * parts


def test_no_room_is_told_with_the_figures() -> None:
    memory = DeviceMemory(total=24 * _GIB, free=4 * _GIB, held=18 * _GIB, peak=23 * _GIB)

    with pytest.raises(ModelError, match=r"of 24\.0 GiB, 4\.0 GiB are free, weights and one step take 23\.0 GiB"):
        block_memory(_config(device="cuda:0"), memory, reserved=0)


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", ""])
def test_names_of_no_device_are_refused(device: str) -> None:
    with pytest.raises(InvalidRequest, match="must be auto, cpu, cuda or cuda:N"):
        _config(device=device)
