"""What the compiled kernels take: they know addresses only, so what does not fit is refused before they run."""

from collections.abc import Callable

import pytest
import torch

from pdserve.kernels.attention import AttentionSpan
from pdserve.kernels.cpu import CpuKernels, PackedSpans
from pdserve.kernels.kv_rows import row_elements
from pdserve.kernels.kv_store import store_kv

Call = Callable[[CpuKernels], object]

_HEAD_DIM = 8
_CACHE = torch.zeros(4, 2, 2, 16, _HEAD_DIM)
_TABLE = torch.tensor([0, 1, 2])
_QUERY, _HEADS, _SLOTS = torch.zeros(1, 4, _HEAD_DIM), torch.zeros(2, 8, _HEAD_DIM), torch.tensor([3, 4])
_ROTATION = torch.ones(2, 4)
_GOOD, _WEIGHT = torch.zeros(2, 8), torch.ones(8)


@pytest.fixture
def kernels() -> CpuKernels:
    loaded = CpuKernels.load(2)
    if loaded is None:
        pytest.skip("the CPU kernels were not built: no C++ compiler")
    return loaded


def _attend(query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor = _TABLE) -> Call:
    return lambda kernels: kernels.attention(query, cache, PackedSpans([AttentionSpan(0, 1, 40, table)]), 0.3)


def _store(heads: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, rotation: torch.Tensor = _ROTATION) -> Call:
    return lambda kernels: kernels.rope_store(heads, (rotation, rotation), cache, slots)


def _multiply(rows: torch.Tensor, bias: torch.Tensor | None = None) -> Call:
    return lambda kernels: kernels.linear(rows, kernels.pack(torch.zeros(3, 8)), bias)


_REFUSED: dict[str, tuple[str, Call]] = {
    "rows of bfloat16": ("rows", lambda kernels: kernels.rms_norm(_GOOD.bfloat16(), _WEIGHT, 1e-5)),
    "rows apart": ("rows", lambda kernels: kernels.rms_norm(torch.zeros(2, 9)[:, :8], _WEIGHT, 1e-5)),
    "a short weight": ("weight", lambda kernels: kernels.rms_norm(_GOOD, _WEIGHT[:4], 1e-5)),
    "a weight of bfloat16": ("weight", lambda kernels: kernels.rms_norm(_GOOD, _WEIGHT.bfloat16(), 1e-5)),
    "half a gate": ("gate_up", lambda kernels: kernels.silu_mul(torch.zeros(2, 9))),
    "short rows": ("rows", _multiply(_GOOD[:, :4])),
    "columns": ("rows", _multiply(torch.zeros(8, 2).T)),
    "a bias of bfloat16": ("bias", _multiply(_GOOD, torch.zeros(3).bfloat16())),
    "a short bias": ("bias", _multiply(_GOOD, torch.zeros(2))),
    "a query of float16": ("query", _attend(_QUERY.half(), _CACHE)),
    "heads that cannot be shared": ("query", _attend(_QUERY[:, :3], _CACHE)),
    "a cache of fp8": ("kv_blocks", _attend(_QUERY, _CACHE.to(torch.float8_e4m3fn))),
    "a cache of shorter rows": ("kv_blocks", _attend(_QUERY, _CACHE[..., :4].contiguous())),
    "a cache of slots before heads": ("kv_blocks", _attend(_QUERY, torch.zeros(4, 2, 16, 2, 8).transpose(2, 3))),
    "a table of int32": ("block_table", _attend(_QUERY, _CACHE, _TABLE.int())),
    "a table apart": ("block_table", _attend(_QUERY, _CACHE, torch.tensor([0, 9, 1, 9, 2, 9])[::2])),
    "heads of float64": ("heads", _store(_HEADS.double(), _CACHE, _SLOTS)),
    "heads before tokens": ("heads", _store(torch.zeros(8, 2, 8).transpose(0, 1), _CACHE, _SLOTS)),
    "slots of int32": ("slot_mapping", _store(_HEADS, _CACHE, _SLOTS.int())),
    "a slot too few": ("slot_mapping", _store(_HEADS, _CACHE, _SLOTS[:1])),
    "a rotation apart": ("rotation", _store(_HEADS, _CACHE, _SLOTS, torch.ones(2, 8)[:, ::2])),
    "a rotation of more than a head": ("rotation", _store(_HEADS, _CACHE, _SLOTS, torch.ones(2, 5))),
}


@pytest.mark.parametrize("name", list(_REFUSED))
def test_what_does_not_fit_is_refused_by_name(kernels: CpuKernels, name: str) -> None:
    argument, call = _REFUSED[name]

    with pytest.raises(ValueError, match=f"^{argument}: "):
        call(kernels)


def test_what_fits_is_taken(kernels: CpuKernels) -> None:
    for call in (_attend(_QUERY, _CACHE), _store(_HEADS, _CACHE, _SLOTS), _multiply(_GOOD, torch.zeros(3))):
        call(kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_a_row_of_padding_is_not_written(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """As the reference leaves it out; it may be the first row, in front of which there is no memory of the cache."""
    heads, slots = torch.randn(3, 8, _HEAD_DIM), torch.tensor([-1, 5, -1])
    ours = torch.zeros(3, 2, 2, 16, row_elements(_HEAD_DIM, dtype), dtype=dtype)[1:]
    expected = ours.clone()

    kernels.rope_store(heads.clone(), None, ours, slots)

    store_kv(heads[:, 4:6], heads[:, 6:], expected, slots)
    assert torch.equal(ours.contiguous().view(torch.uint8), expected.view(torch.uint8))
    whole = ours._base
    assert whole is not None and not whole[0].any()
