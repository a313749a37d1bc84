"""Attention over a cache of bfloat16: one definition down to the bits, whatever multiplies and whoever else is there.

Queries and weights are rounded to bfloat16, sums are float32. A chain takes the odd one of a pair of dimensions, or of
positions, first; what is too small for a normal number counts as 0. Weights are of the highest score of a partition of
256 positions, and a row is divided by the sum of its rounded weights.
"""

import ctypes
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pdserve.kernels.cpu as cpu
from pdserve.kernels.attention import AttentionSpan, paged_attention
from pdserve.kernels.cpu import CpuKernels, PackedSpans, runs_here

_PARTITION, _SUM_LANES = 256, 16
_SMALLEST_NORMAL = 2.0**-126
_LOG2_E = 1.44269504


def _libraries() -> list[Path]:
    built = sorted(Path(cpu.__file__).parent.glob("cpu_*.so"))
    return [path for path in built if runs_here(ctypes.CDLL(str(path)))]


if not _libraries():
    pytest.skip("the CPU kernels were not built: no C++ compiler", allow_module_level=True)


@pytest.fixture(params=_libraries(), ids=lambda path: path.name.split(".")[0])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(ctypes.CDLL(str(request.param)), 3)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _flushed(x: Tensor) -> Tensor:
    return torch.where(x.abs() < _SMALLEST_NORMAL, torch.zeros_like(x), x)


def _fused(a: Tensor, b: Tensor, c: Tensor | float) -> Tensor:
    """a * b + c of float32 with one rounding: in float64 the product is exact, and the sum nearly always."""
    return (a.double() * b.double() + torch.as_tensor(c, dtype=torch.float32).double()).float()


def _chain(a: Tensor, b: Tensor, sums: Tensor) -> Tensor:
    """Sum a[i] * b[i] over the first dimension, the odd one of each pair first."""
    for i in range(0, len(a), 2):
        for which in (i + 1, i):
            if which < len(a):
                sums = _flushed(_fused(_flushed(a[which]), _flushed(b[which]), sums))
    return sums


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = _fused(value, x, coefficient)
    return value


def _coarse_exp(x: Tensor) -> Tensor:
    power = x * _LOG2_E
    n = power.clamp(min=-126).floor()
    fraction = power.clamp(min=-126) - n
    value = _polynomial(fraction, (0.0134266847, 0.0522424728, 0.241280198, 0.693044841, 1.0))
    return torch.where(power < -126, 0.0, torch.ldexp(value, n))


def _fine_exp(x: Tensor) -> Tensor:
    x = x.clamp(min=-87)
    n = _fused(x, torch.tensor(_LOG2_E), 12582912.0) - 12582912.0
    rest = _fused(n, torch.tensor(2.12194440e-4), _fused(n, torch.tensor(-0.693359375), x))
    return torch.ldexp(_polynomial(rest, (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)), n)


def _total(weights: Tensor) -> Tensor:  # [..., 256] -> [...]
    lanes = torch.zeros(*weights.shape[:-1], _SUM_LANES)
    for some in weights.split(_SUM_LANES, dim=-1):
        lanes = lanes + some
    while lanes.shape[-1] > 1:
        lanes = lanes[..., : lanes.shape[-1] // 2] + lanes[..., lanes.shape[-1] // 2 :]
    return lanes[..., 0]


def _partition(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums [tokens, heads, dim], highest scores and totals [tokens, heads] of at most 256 positions."""
    rounded = query.bfloat16().float().permute(2, 0, 1)[..., None]  # [dim, tokens, heads, 1]
    scores = _chain(rounded, keys.permute(2, 0, 1)[:, None], torch.zeros(*query.shape[:2], keys.shape[1]))
    scores = _flushed(scores * scale)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    highest = scores.amax(-1)
    weights = _coarse_exp(scores - highest[..., None]).nan_to_num(0.0).bfloat16().float()
    sums = _chain(weights.permute(2, 0, 1)[..., None], values.transpose(0, 1)[:, None], torch.zeros(query.shape))
    padded = torch.nn.functional.pad(weights, (0, _PARTITION - weights.shape[-1]))
    return sums, highest, _total(padded)


def _defined(query: Tensor, kv_blocks: Tensor, span: AttentionSpan, scale: float, window: int | None) -> Tensor:
    """Attention of one span as it is defined."""
    own = query[span.query_start : span.query_start + span.query_len]
    gathered = kv_blocks[span.block_table].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : span.context_len].float()
    keys, values = gathered.repeat_interleave(query.shape[1] // gathered.shape[1], dim=1)
    positions, others = torch.arange(span.context_len - span.query_len, span.context_len), torch.arange(len(keys[0]))
    seen = others <= positions[:, None]
    if window is not None:
        seen &= others > positions[:, None] - window
    sums, highest, totals = torch.zeros(own.shape), torch.full(own.shape[:2], -torch.inf), torch.zeros(own.shape[:2])
    for start in range(0, span.context_len, _PARTITION):
        part = slice(start, start + _PARTITION)
        found = _partition(own, keys[:, part], values[:, part].nan_to_num(0.0), seen[:, part], scale)
        is_any = found[1] > -torch.inf
        maximum = torch.maximum(highest, found[1])
        keep = torch.where(highest > -torch.inf, _fine_exp(highest - maximum), 0.0)
        add = _fine_exp(found[1] - maximum)
        merged = _flushed(_fused(sums, keep[..., None], _flushed(found[0] * add[..., None])))
        sums = torch.where(is_any[..., None], merged, sums)
        totals = torch.where(is_any, _fused(totals, keep, found[2] * add), totals)
        highest = torch.where(is_any, maximum, highest)
    return _flushed(sums / totals[..., None])


def _assert_defined(kernels: CpuKernels, output: Tensor, expected: Tensor) -> None:
    if kernels.lanes > 4:
        assert torch.equal(output, expected)
    else:  # without fused multiply-adds a score may round a weight to its neighbour
        torch.testing.assert_close(output, expected, atol=2e-2, rtol=1e-2)


def _spans(lengths: list[tuple[int, int]], block_size: int, num_blocks: int) -> list[AttentionSpan]:
    spans, start = [], 0
    for query_len, context_len in lengths:
        table = torch.randperm(num_blocks)[: -(-context_len // block_size)]
        spans.append(AttentionSpan(start, query_len, context_len, table))
        start += query_len
    return spans


# (heads, KV heads, head_dim, block size): head_dim in whole vectors of pairs and not, and odd; 1 to 9 heads a KV head.
_SHAPES = [
    (9, 3, 64, 16), (8, 2, 40, 7), (4, 1, 128, 8), (2, 2, 80, 32), (12, 2, 256, 128), (7, 7, 96, 16),
    (5, 1, 33, 16), (7, 1, 16, 5), (8, 1, 64, 16), (9, 1, 48, 16),
]  # fmt: skip
_LENGTHS = [(1, 1), (1, 2), (5, 5), (9, 256), (1, 257), (1, 258), (2, 301), (37, 514)]


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 8, 257])
def test_bits_are_those_of_the_definition(shape: tuple[int, int, int, int], window: int | None) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    kv_blocks = torch.randn(128, 2, num_kv_heads, block_size, head_dim).bfloat16()
    spans = _spans(_LENGTHS, block_size, 128)
    query = torch.randn(sum(length for length, _ in _LENGTHS), num_heads, head_dim)
    expected = torch.cat([_defined(query, kv_blocks, span, 0.2, window) for span in spans])
    torch.testing.assert_close(expected, paged_attention(query, kv_blocks, spans, 0.2, window), atol=4e-2, rtol=1e-2)

    for path in _libraries():
        kernels = CpuKernels(ctypes.CDLL(str(path)), 3)
        _assert_defined(kernels, kernels.attention(query, kv_blocks, PackedSpans(spans), 0.2, window), expected)


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (7, None), (20, 3.0)])
def test_a_token_has_the_same_bits_alone_in_any_chunk_and_on_any_threads(
    kernels: CpuKernels, shape: tuple[int, int, int, int], window: int | None, soft_cap: float | None
) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    kv_blocks = torch.randn(64, 2, num_kv_heads, block_size, head_dim).bfloat16()
    table = torch.randperm(64)
    query = torch.randn(60, num_heads, head_dim)
    context_len = min(290, 64 * block_size)
    [whole] = [AttentionSpan(0, 60, context_len, table[: -(-context_len // block_size)])]

    output = kernels.attention(query, kv_blocks, PackedSpans([whole]), 0.3, window, soft_cap)

    for chunk in (1, 2, 5, 31):
        spans = []
        for first in range(0, 60, chunk):
            length = min(chunk, 60 - first)
            end = context_len - 60 + first + length
            spans.append(AttentionSpan(first, length, end, table[: -(-end // block_size)]))
        assert torch.equal(kernels.attention(query, kv_blocks, PackedSpans(spans), 0.3, window, soft_cap), output)
        alone = CpuKernels(kernels._library, 1)
        assert torch.equal(alone.attention(query, kv_blocks, PackedSpans(spans), 0.3, window, soft_cap), output)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_builds_that_fuse_multiply_and_add_have_the_same_bits(soft_cap: float | None) -> None:
    builds = [CpuKernels(ctypes.CDLL(str(path)), 2) for path in _libraries()]
    builds = [each for each in builds if each.lanes > 4]
    if len(builds) < 2:
        pytest.skip("one build runs here")
    kv_blocks = torch.randn(64, 2, 2, 8, 72).bfloat16()
    spans = PackedSpans(_spans([(1, 1), (1, 400), (41, 290), (9, 9)], 8, 64))
    query = torch.randn(52, 6, 72)

    outputs = [each.attention(query, kv_blocks, spans, 0.2, 111, soft_cap) for each in builds]

    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("tiny", ["keys", "values", "query", "products", "scores", "outputs"])
def test_what_is_too_small_for_a_normal_number_counts_as_nothing(kernels: CpuKernels, tiny: str) -> None:
    kv_blocks, query = torch.randn(20, 2, 2, 16, 48), torch.randn(9, 4, 48)
    scale = 1e-3 if tiny == "scores" else 0.3
    if tiny in ("products", "scores"):
        kv_blocks *= 1e-25
        query *= 1e-15 if tiny == "products" else 1e-12
    elif tiny == "outputs":
        kv_blocks[:, 1] *= 2e-38
    else:  # every third is subnormal
        {"keys": kv_blocks[:, 0], "values": kv_blocks[:, 1], "query": query}[tiny][..., ::3] *= 3e-40
    kv_blocks = kv_blocks.bfloat16()
    spans = _spans([(1, 300), (8, 71)], 16, 20)

    output = kernels.attention(query, kv_blocks, PackedSpans(spans), scale)

    expected = torch.cat([_defined(query, kv_blocks, span, scale, None) for span in spans])
    _assert_defined(kernels, output, expected)


def test_subnormal_numbers_are_the_callers_again_afterwards(kernels: CpuKernels) -> None:
    kv_blocks = torch.randn(4, 2, 1, 16, 32).bfloat16()
    one = CpuKernels(kernels._library, 1)

    one.attention(torch.randn(1, 1, 32), kv_blocks, PackedSpans(_spans([(1, 33)], 16, 4)), 1.0)

    assert (torch.tensor([1e-39]) * torch.tensor([0.5])).item() > 0


@pytest.mark.parametrize("window", [None, 1, 2, 3, 8, 9])
def test_what_no_query_sees_is_not_read(kernels: CpuKernels, window: int | None) -> None:
    """Beyond the context as before the window, beside the last position of a pair as in other blocks."""
    kv_blocks, queries = torch.randn(40, 2, 2, 8, 40).bfloat16(), torch.randn(7, 6, 40)
    for query_len, context_len in product((1, 2, 7), (9, 16, 31, 64, 259)):
        query = queries[:query_len]
        [span] = _spans([(query_len, context_len)], 8, 40)
        poisoned = torch.full_like(kv_blocks, torch.nan)
        first = 0 if window is None else max(0, context_len - query_len - window + 1)
        for position in range(first, context_len):
            block = span.block_table[position // 8]
            poisoned[block, :, :, position % 8] = kv_blocks[block, :, :, position % 8]

        output = kernels.attention(query, poisoned, PackedSpans([span]), 0.3, window)

        assert torch.equal(output, kernels.attention(query, kv_blocks, PackedSpans([span]), 0.3, window))


def test_large_scores_do_not_overflow(kernels: CpuKernels) -> None:
    kv_blocks = (torch.randn(8, 2, 1, 16, 64) * 30).bfloat16()
    spans = _spans([(3, 100)], 16, 8)
    query = torch.randn(3, 2, 64) * 30

    output = kernels.attention(query, kv_blocks, PackedSpans(spans), 1.0)

    _assert_defined(kernels, output, _defined(query, kv_blocks, spans[0], 1.0, None))


def test_what_is_not_a_number_stays_one(kernels: CpuKernels) -> None:
    kv_blocks = torch.randn(8, 2, 2, 16, 64).bfloat16()
    [span] = _spans([(3, 100)], 16, 8)
    kv_blocks[span.block_table[2], 0, 1, 5, 7] = torch.nan

    output = kernels.attention(torch.randn(3, 4, 64), kv_blocks, PackedSpans([span]), 0.1)

    assert output[:, :2].isfinite().all() and output[:, 2:].isnan().all()
