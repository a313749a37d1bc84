"""The compiled CPU kernels: equal to the torch reference up to rounding, and the same bits in any company."""

import ctypes
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import pdserve.kernels.cpu as cpu
from pdserve.kernels.attention import AttentionSpan, paged_attention
from pdserve.kernels.cpu import CpuKernels, PackedSpans, runs_here
from pdserve.kernels.kv_rows import expand_rows, pack_rows, row_elements
from pdserve.kernels.kv_store import store_kv
from pdserve.kernels.rms_norm import rms_norm
from pdserve.kernels.rope import apply_rope


def _libraries() -> list[Path]:
    built = sorted(Path(cpu.__file__).parent.glob("cpu_*.so"))
    return [path for path in built if runs_here(ctypes.CDLL(str(path)))]


if not _libraries():
    pytest.skip("the CPU kernels were not built: no C++ compiler", allow_module_level=True)


@pytest.fixture(params=_libraries(), ids=lambda path: path.name.split(".")[0])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return ctypes.CDLL(str(request.param))


@pytest.fixture(params=[1, 3])
def kernels(library: ctypes.CDLL, request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(library, request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_best_library_of_this_processor_is_loaded() -> None:
    loaded = CpuKernels.load(1)

    assert loaded is not None
    assert loaded.lanes == max(CpuKernels(ctypes.CDLL(str(path)), 1).lanes for path in _libraries())


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (16, 8), (17, 40), (199, 64), (250, 576), (1000, 33)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear(kernels: CpuKernels, num_outputs: int, num_inputs: int, has_bias: bool) -> None:
    weight, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs) if has_bias else None
    packed = kernels.pack(weight)
    for num_rows in (1, 2, 3, 5, 8, 9, 23, 100):
        x = torch.randn(num_rows, num_inputs + 3)[:, :num_inputs]  # rows further apart than their length

        y = kernels.linear(x, packed, bias)

        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-5)
        alone = torch.cat([kernels.linear(row[None], packed, bias) for row in x])
        assert torch.equal(alone, y)


def test_packed_weight_gives_its_rows_back(kernels: CpuKernels) -> None:
    weight = torch.randn(199, 24)
    indexes = torch.tensor([0, 198, 7, 7, 192])

    assert torch.equal(kernels.pack(weight).rows(indexes), weight[indexes])


_SHAPES = [(9, 3, 64, 16), (8, 2, 40, 7), (4, 1, 128, 8), (2, 2, 80, 32), (6, 2, 256, 128), (7, 7, 96, 16)]


def _spans(lengths: list[tuple[int, int]], block_size: int, num_blocks: int) -> list[AttentionSpan]:
    spans, start = [], 0
    for query_len, context_len in lengths:
        table = torch.randperm(num_blocks)[: -(-context_len // block_size)]
        spans.append(AttentionSpan(start, query_len, context_len, table))
        start += query_len
    return spans


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[(1, 1)], [(1, 300)], [(5, 5)], [(20, 33)], [(1, 255), (9, 256), (1, 257), (11, 513)], [(64, 700), (1, 2)]],
    ids=str,
)
def test_attention(kernels: CpuKernels, shape: tuple[int, int, int, int], lengths: list[tuple[int, int]]) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    cache = torch.randn(128, 3, 2, num_kv_heads, block_size, head_dim)
    kv_blocks = cache[:, 1]
    spans = _spans(lengths, block_size, 128)
    query = torch.randn(sum(length for length, _ in lengths), num_heads + 1, head_dim)[:, :num_heads]

    output = kernels.attention(query, kv_blocks, PackedSpans(spans), 0.3)

    torch.testing.assert_close(output, paged_attention(query, kv_blocks, spans, 0.3), atol=2e-5, rtol=1e-5)
    for span in spans:  # each token alone, as a decode step would compute it
        for index in {0, span.query_len // 2, span.query_len - 1}:
            context_len = span.context_len - span.query_len + index + 1
            row = query[span.query_start + index : span.query_start + index + 1]
            single = PackedSpans([AttentionSpan(0, 1, context_len, span.block_table)])
            alone = kernels.attention(row, kv_blocks, single, 0.3)
            assert torch.equal(alone[0], output[span.query_start + index])


@pytest.mark.parametrize("window", [1, 7, 8, 9, 300])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_attention_with_window_and_soft_cap(kernels: CpuKernels, window: int, soft_cap: float | None) -> None:
    """C153: the current token and the window - 1 before it."""
    kv_blocks = torch.randn(64, 2, 2, 8, 32)
    spans = _spans([(1, 8), (1, 400), (30, 290), (9, 9)], 8, 64)
    query = torch.randn(41, 4, 32)

    output = kernels.attention(query, kv_blocks, PackedSpans(spans), 0.2, window, soft_cap)

    expected = torch.cat([_dense(query, kv_blocks, span, 0.2, soft_cap, window) for span in spans])
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-5)


def _dense(
    query: torch.Tensor, kv_blocks: torch.Tensor, span: AttentionSpan, scale: float, soft_cap: float | None, window: int
) -> torch.Tensor:
    gathered = kv_blocks[span.block_table].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : span.context_len]
    keys, values = gathered.repeat_interleave(query.shape[1] // gathered.shape[1], dim=1)
    rows = query[span.query_start : span.query_start + span.query_len].transpose(0, 1)
    scores = rows @ keys.transpose(1, 2) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    positions = torch.arange(span.context_len - span.query_len, span.context_len)[:, None]
    others = torch.arange(span.context_len)[None]
    hidden = (others > positions) | (others <= positions - window)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1)


def test_large_scores_do_not_overflow(kernels: CpuKernels) -> None:
    kv_blocks = torch.randn(8, 2, 1, 16, 64) * 30
    spans = _spans([(3, 100)], 16, 8)
    query = torch.randn(3, 2, 64) * 30

    output = kernels.attention(query, kv_blocks, PackedSpans(spans), 1.0)

    torch.testing.assert_close(output, paged_attention(query, kv_blocks, spans, 1.0), atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 40, 576, 1001])
def test_rms_norm(kernels: CpuKernels, size: int) -> None:
    x, weight = torch.randn(5, size) * 4, torch.randn(size)

    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [7, 40, 576, 577])
def test_rms_norm_has_the_same_bits_in_every_build_that_fuses(size: int) -> None:
    x, weight = torch.randn(3, size), torch.randn(size)
    builds = [path for path in _libraries() if "generic" not in path.name]

    results = [CpuKernels(ctypes.CDLL(str(path)), 1).rms_norm(x, weight, 1e-5) for path in builds]

    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("size", [1, 33, 1536])
def test_silu_mul(kernels: CpuKernels, size: int) -> None:
    gate_up = torch.randn(4, 2 * size) * 20

    expected = F.silu(gate_up[:, :size].double()) * gate_up[:, size:].double()
    torch.testing.assert_close(kernels.silu_mul(gate_up).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (40, 20), (64, 8)])
def test_rope_store(kernels: CpuKernels, head_dim: int, half: int) -> None:
    num_heads, num_kv_heads, block_size = 6, 2, 8
    heads = torch.randn(5, num_heads + 2 * num_kv_heads, head_dim)
    cos, sin = torch.randn(5, half), torch.randn(5, half)
    slots = torch.tensor([3, 8, 70, 127, 0])
    expected_cache, cache = torch.zeros(2, 16, 3, 2, num_kv_heads, block_size, head_dim)
    rotated = apply_rope(heads[:, : num_heads + num_kv_heads], cos, sin)
    store_kv(rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :], expected_cache[:, 1], slots)

    query = kernels.rope_store(heads, (cos, sin), cache[:, 1], slots)

    torch.testing.assert_close(query, rotated[:, :num_heads], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(cache, expected_cache, atol=1e-6, rtol=1e-6)


_KV_DTYPES = [torch.bfloat16, torch.float16, torch.int8]
# Over bfloat16, queries and weights are rounded too; the reference rounds neither, test_bfloat16_attention.py does.
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 2e-5, torch.int8: 2e-5}


def _packed_cache(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return one layer of a cache of several, filled with rows."""
    cache = torch.zeros(shape[0], 3, *shape[1:-1], row_elements(shape[-1], dtype), dtype=dtype)
    cache[:, 1] = pack_rows(torch.randn(shape), dtype)
    return cache[:, 1]


@pytest.mark.parametrize("dtype", _KV_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*_SHAPES, *((group, 1, 64, 16) for group in (1, 5, 8, 9))], ids=str)
def test_attention_over_a_cache_of_another_format(
    kernels: CpuKernels, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    kv_blocks = _packed_cache(dtype, (128, 2, num_kv_heads, block_size, head_dim))
    spans = _spans([(1, 1), (5, 5), (9, 256), (1, 257), (40, 513)], block_size, 128)
    query = torch.randn(56, num_heads + 1, head_dim)[:, :num_heads]

    output = kernels.attention(query, kv_blocks, PackedSpans(spans), 0.3)

    expected = paged_attention(query, kv_blocks, spans, 0.3)
    torch.testing.assert_close(output, expected, atol=_TOLERANCE[dtype], rtol=1e-5)
    for span in spans:  # each token alone, as a decode step would compute it
        for index in {0, span.query_len // 2, span.query_len - 1}:
            context_len = span.context_len - span.query_len + index + 1
            row = query[span.query_start + index : span.query_start + index + 1]
            single = PackedSpans([AttentionSpan(0, 1, context_len, span.block_table)])
            alone = kernels.attention(row, kv_blocks, single, 0.3)
            assert torch.equal(alone[0], output[span.query_start + index])


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [*_SHAPES, (8, 1, 48, 16)], ids=str)
def test_rows_are_expanded_exactly(kernels: CpuKernels, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    """Attention has the bits that it has over the same values in float32, with few query rows and with many."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    kv_blocks = _packed_cache(dtype, (48, 2, num_kv_heads, block_size, head_dim))
    spans = PackedSpans(_spans([(1, 1), (1, 300), (2, 257), (40, 290)], block_size, 48))
    query = torch.randn(44, num_heads, head_dim)

    output = kernels.attention(query, kv_blocks, spans, 0.3)

    assert torch.equal(output, kernels.attention(query, expand_rows(kv_blocks, torch.float32), spans, 0.3))


@pytest.mark.parametrize("dtype", _KV_DTYPES, ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (7, 5.0), (8, None), (9, 5.0), (300, 5.0), (None, 2.0)])
def test_attention_over_another_format_with_window_and_soft_cap(
    kernels: CpuKernels, dtype: torch.dtype, window: int | None, soft_cap: float | None
) -> None:
    """What no query sees is not read, nor what is unwritten."""
    kv_blocks = _packed_cache(dtype, (64, 2, 2, 8, 32))
    spans = _spans([(1, 8), (1, 395), (30, 290), (9, 9)], 8, 64)
    query = torch.randn(41, 4, 32)
    expected = paged_attention(query, kv_blocks, spans, 0.2, window, soft_cap)
    whole = kernels.attention(query, kv_blocks, PackedSpans(spans), 0.2, window, soft_cap)
    poison = pack_rows(torch.full((32,), torch.nan), dtype)
    poisoned = kv_blocks.clone()
    written = [span.block_table[:-1] for span in spans]
    for span in spans:
        if span.context_len % 8 and span.block_table[-1] not in torch.cat(written):
            poisoned[span.block_table[-1], :, :, span.context_len % 8 :] = poison

    output = kernels.attention(query, kv_blocks, PackedSpans(spans), 0.2, window, soft_cap)

    torch.testing.assert_close(output, expected, atol=_TOLERANCE[dtype], rtol=1e-5)
    alone = kernels.attention(query, poisoned, PackedSpans(spans), 0.2, window, soft_cap)
    assert torch.equal(alone, whole)


@pytest.mark.parametrize("dtype", _KV_DTYPES, ids=str)
@pytest.mark.parametrize("has_rope", [True, False])
def test_rope_store_into_another_format(kernels: CpuKernels, dtype: torch.dtype, has_rope: bool) -> None:
    num_heads, num_kv_heads, head_dim, block_size = 6, 2, 40, 8
    heads = torch.randn(5, num_heads + 2 * num_kv_heads, head_dim)
    rotation = (torch.randn(5, 20), torch.randn(5, 20)) if has_rope else None
    slots = torch.tensor([3, 8, 70, 127, 0])
    expected_cache, cache = torch.zeros(
        2, 16, 3, 2, num_kv_heads, block_size, row_elements(head_dim, dtype), dtype=dtype
    )
    original = heads.clone()

    query = kernels.rope_store(heads, rotation, cache[:, 1], slots)

    rotated = apply_rope(original[:, : num_heads + num_kv_heads], *rotation) if rotation else original[:, :8]
    torch.testing.assert_close(query, rotated[:, :num_heads], atol=1e-6, rtol=1e-6)
    store_kv(heads[:, num_heads : num_heads + num_kv_heads], heads[:, -num_kv_heads:], expected_cache[:, 1], slots)
    assert torch.equal(cache, expected_cache)  # the same bits as the reference writes


@pytest.mark.parametrize("dtype", _KV_DTYPES, ids=str)
def test_every_extreme_is_stored_as_the_reference_stores_it(kernels: CpuKernels, dtype: torch.dtype) -> None:
    values = [0.0, -0.0, 1e-45, 1e-40, 5.9e-8, 6.2e-8, 6.1e-5, 65504.0, 65519.0, 65520.0, 1e6, 3e38, float("inf")]
    halves = torch.arange(0, 2**15, 7, dtype=torch.int16).view(torch.float16).float()
    rows = [torch.tensor([value, -1.0, value / 3, 2.5, -value, 3.5, 0.5, 1.5]) for value in values]
    rows += [*halves.nan_to_num(1.0).split(8)[:-1], *(halves.nan_to_num(1.0) * 1.0003).split(8)[:-1]]
    heads = torch.stack(rows)[:, None].expand(-1, 3, -1).contiguous()
    num_blocks = -(-len(rows) // 8)
    cache = torch.zeros(num_blocks, 2, 1, 8, row_elements(8, dtype), dtype=dtype)
    expected = cache.clone()
    slots = torch.arange(len(rows))

    kernels.rope_store(heads, None, cache, slots)

    store_kv(heads[:, 1:2], heads[:, 2:3], expected, slots)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8)) or _differ_in_nan_only(cache, expected)


def _differ_in_nan_only(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(
        expand_rows(ours, torch.float32).nan_to_num(7.0), expand_rows(theirs, torch.float32).nan_to_num(7.0)
    )


def test_many_calls_from_several_threads_in_turn(library: ctypes.CDLL) -> None:
    """The pool serves one engine thread after another; every task of every round is done exactly once."""
    kernels = CpuKernels(library, 4)
    weight = torch.randn(333, 48)
    packed = kernels.pack(weight)
    x = torch.randn(3, 48)
    expected = kernels.linear(x, packed, None)

    for _ in range(3000):
        assert torch.equal(kernels.linear(x, packed, None), expected)
