"""A fused layer has the bits of its operations one by one, on every build, for any rows and number of threads."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pdserve.kernels.cpu as cpu
from pdserve.kernels.attention import AttentionSpan
from pdserve.kernels.cpu import CpuKernels, runs_here
from pdserve.kernels.fused_layer import FusedLayer, GatedLayer, Projection
from pdserve.kernels.kv_rows import pack_rows

_EPS, _BLOCK_SIZE, _NUM_BLOCKS = 1e-5, 8, 40


def _libraries() -> list[Path]:
    built = sorted(Path(cpu.__file__).parent.glob("cpu_*.so"))
    return [path for path in built if runs_here(ctypes.CDLL(str(path)))]


@pytest.fixture(params=_libraries(), ids=lambda path: path.name.split(".")[0])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(ctypes.CDLL(str(request.param)), 3, is_int8=True)


def _layer(kernels: CpuKernels, heads: tuple[int, int, int], has_bias: bool, window: int | None) -> GatedLayer:
    num_heads, num_kv_heads, head_dim = heads
    hidden, inner = 72, 100

    def projection(num_outputs: int, num_inputs: int) -> Projection:
        weight = torch.randn(num_outputs, num_inputs) * num_inputs**-0.5
        return Projection(kernels.pack(weight), torch.randn(num_outputs) if has_bias else None)

    return GatedLayer(
        input_norm=torch.rand(hidden) + 0.5,
        mlp_norm=torch.rand(hidden) + 0.5,
        qkv=projection((num_heads + 2 * num_kv_heads) * head_dim, hidden),
        output=projection(hidden, num_heads * head_dim),
        up=projection(2 * inner, hidden),
        down=projection(hidden, inner),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window,
        eps=_EPS,
        scale=head_dim**-0.5,
        soft_cap=None,
        residual=1.0,
    )


def _one_by_one(
    kernels: CpuKernels,
    layer: GatedLayer,
    hidden: Tensor,
    rotation: tuple[Tensor, Tensor],
    cache: Tensor,
    slots: Tensor,
    spans: list[AttentionSpan],
) -> Tensor:
    normed = kernels.rms_norm(hidden, layer.input_norm, layer.eps)
    heads = kernels.linear(normed, layer.qkv.weight, layer.qkv.bias).view(len(hidden), -1, layer.head_dim)
    query = kernels.rope_store(heads, rotation, cache, slots)
    attended = kernels.attention(query, cache, kernels.prepare(spans), layer.scale, layer.window)
    hidden = hidden + kernels.linear(attended.flatten(1), layer.output.weight, layer.output.bias)
    gate_up = kernels.linear(kernels.rms_norm(hidden, layer.mlp_norm, layer.eps), layer.up.weight, layer.up.bias)
    return hidden + kernels.linear(kernels.silu_mul(gate_up), layer.down.weight, layer.down.bias)


@pytest.mark.parametrize("heads", [(4, 2, 16), (6, 1, 24), (3, 3, 40)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("window", "kv_dtype"),
    [(None, torch.float32), (5, torch.float32), (None, torch.bfloat16), (5, torch.float16), (None, torch.int8)],
)
def test_fused_layer_has_the_bits_of_its_operations(
    kernels: CpuKernels, heads: tuple[int, int, int], has_bias: bool, window: int | None, kv_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = _layer(kernels, heads, has_bias, window)
    fused = kernels.fuse(layer)
    assert fused is not None
    for lengths in ([(1, 1)], [(1, 70)], [(1, 9), (20, 33), (1, 150)], [(50, 50)]):
        spans, start = [], 0
        table = torch.randperm(_NUM_BLOCKS)
        for query_len, context_len in lengths:
            count = -(-context_len // _BLOCK_SIZE)
            spans.append(AttentionSpan(start, query_len, context_len, table[:count].clone()))
            table, start = table[count:], start + query_len
        slots = torch.cat([_slots(span) for span in spans])
        rotation = torch.randn(start, heads[2] // 2), torch.randn(start, heads[2] // 2)
        cache = pack_rows(torch.randn(_NUM_BLOCKS, 3, 2, heads[1], _BLOCK_SIZE, heads[2]), kv_dtype)
        other = cache.clone()
        hidden = torch.randn(start, 72)
        expected = _one_by_one(kernels, layer, hidden, rotation, other[:, 1], slots, spans)

        kernels.run_layers([fused], hidden, [rotation], [cache[:, 1]], slots, kernels.prepare(spans))

        assert torch.equal(hidden, expected)
        assert torch.equal(cache, other)


def _slots(span: AttentionSpan) -> Tensor:
    positions = torch.arange(span.context_len - span.query_len, span.context_len)
    return span.block_table[positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE


def test_layers_of_float_weights_are_not_fused(kernels: CpuKernels) -> None:
    layer = _layer(CpuKernels(ctypes.CDLL(str(_libraries()[0])), 1), (2, 1, 16), False, None)

    assert FusedLayer.of(layer) is None
