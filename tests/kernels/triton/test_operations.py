"""A decoder's operations on Triton kernels: the same layer as the torch reference, and who is chosen for a GPU."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pdserve.kernels.operations import Operations, TorchOperations, choose_operations

IS_INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"


def _gpu_operations(dtype: str = "float32", *, is_batch_invariant: bool = False) -> Operations:
    device = torch.device("cpu" if IS_INTERPRETED else "cuda")
    return choose_operations(
        dtype, 1, use_cpu_kernels=True, triton_device=device, is_batch_invariant=is_batch_invariant
    )


def _step(operations: Operations, inputs: Any, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate and store the last tokens of each sequence, attend, project; return the result and the cache."""
    query, spans = inputs.query, inputs.spans
    num_kv_heads, block_size = inputs.kv_blocks.shape[2:4]
    torch.manual_seed(1)
    kv_blocks = inputs.kv_blocks.clone()
    keys_values = torch.randn(len(query), 2 * num_kv_heads, head_dim).to(query.device)
    angles = torch.randn(len(query), head_dim // 4).to(query.device)
    slots = []
    for span in spans:
        positions = torch.arange(span.context_len - span.query_len, span.context_len, device=query.device)
        slots.append(span.block_table[positions // block_size] * block_size + positions % block_size)
    heads = torch.cat((query, keys_values), 1)
    rotated = operations.rope_store(heads, (angles.cos(), angles.sin()), kv_blocks, torch.cat(slots))
    attended = operations.attention(rotated, kv_blocks, operations.prepare(spans), 0.3, 30, None).flatten(1)
    weight = torch.randn(2 * head_dim, attended.shape[1]).to(query.device) / attended.shape[1] ** 0.5
    normed = operations.rms_norm(attended, torch.ones(attended.shape[1], device=query.device), 1e-5)
    return operations.silu_mul(operations.linear(normed, operations.pack(weight), None)), kv_blocks


@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_a_layer_is_that_of_the_reference(make_inputs: Callable[..., Any], is_batch_invariant: bool) -> None:
    inputs = make_inputs(sequences=((1, 40), (6, 50), (1, 3), (2, 2)), head_dim=40)

    ours, our_cache = _step(_gpu_operations(is_batch_invariant=is_batch_invariant), inputs, 40)

    expected, cache = _step(TorchOperations(), inputs, 40)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(our_cache, cache, atol=1e-6, rtol=1e-6, equal_nan=True)


def test_weights_of_8_bits_and_their_rows(device: torch.device) -> None:
    torch.manual_seed(2)
    operations, weight, rows = _gpu_operations("int8"), torch.randn(50, 40), torch.randn(3, 40)

    packed = operations.pack(weight.to(device))

    product = operations.linear(rows.to(device), packed, None).cpu()
    assert (product - rows @ weight.T).norm() < 0.02 * product.norm()
    embedded = operations.embed(torch.tensor([7, 0], device=device), packed).cpu()
    assert (embedded - weight[[7, 0]]).abs().max() < weight.abs().max() / 127
    assert operations.pack_unrounded(weight) is weight


def test_an_empty_batch_has_neither_decode_nor_prefill() -> None:
    operations = _gpu_operations()

    layout = operations.prepare([])

    assert layout.decode is None
    assert layout.prefill(2, torch.float32) is None and layout.decode_rows is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_run_on_the_gpu(make_inputs: Callable[..., Any]) -> None:
    inputs = make_inputs(sequences=((1, 2000), (300, 1000)), head_dim=128, dtype=torch.bfloat16)
    assert inputs.query.device.type == "cuda"
    operations, reference = _gpu_operations("bfloat16"), TorchOperations()

    ours = operations.attention(inputs.query, inputs.kv_blocks, operations.prepare(inputs.spans), 0.1, None, None)

    expected = reference.attention(inputs.query, inputs.kv_blocks, inputs.spans, 0.1, None, None)
    torch.testing.assert_close(ours, expected, atol=3e-2, rtol=3e-2)
