"""The compiled CPU kernels: found, chosen for this processor and called through ctypes.

Each function has the result of the torch reference of the same name up to rounding (attention over a cache of bfloat16
rounds queries and weights to bfloat16, too); unlike it, the result of a row never depends on the other rows. Built with
the package (see pyproject.toml); without a compiler there is none, and `load` returns None.
"""

import ctypes
import importlib.machinery
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdserve.kernels.attention import AttentionSpan, FlatSpans
from pdserve.kernels.fused_layer import ROW_FORMATS, FusedLayer, GatedLayer, LayerSteps, RowCache, Weight
from pdserve.kernels.kv_rows import row_elements
from pdserve.kernels.packed_weight import PackedInt8Weight, PackedWeight
from pdserve.kernels.rms_norm import rms_norm

# The best first. What torch says of the processor comes first, so that ATEN_CPU_CAPABILITY rules these kernels, too.
_BY_CAPABILITY = {
    "AVX512": ("avx512bf16", "avx512vnni", "avx512", "avx2", "generic"),
    "AVX2": ("avx2", "generic"),
}
_FLOAT32 = torch.float32
_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class CpuKernels:
    """The kernels of one library, run by `num_threads` threads; `is_int8` says what weights are packed as."""

    has_own_threads = True

    def __init__(self, library: ctypes.CDLL, num_threads: int, *, is_int8: bool = False) -> None:
        self._library = library
        self._num_threads = num_threads
        self._is_int8 = is_int8
        self._steps: LayerSteps | None = None  # of the layers that ran last
        self.lanes = int(library.pdserve_lanes())
        self._inputs = int(library.pdserve_inputs())
        self.description = f"compiled CPU kernels ({self.lanes} lanes, {num_threads} threads)"
        library.pdserve_share_cores.argtypes = (_INT, _INT64, _INT)
        _declare(library.pdserve_linear, _POINTER, _INT64, *[_POINTER] * 3, *[_INT64] * 4, _INT)
        _declare(library.pdserve_int8_linear, _POINTER, _INT64, *[_POINTER] * 4, *[_INT64] * 4, _INT)
        cache: type[Any] = ctypes.POINTER(RowCache)
        attention: list[type[Any]] = [
            _POINTER,
            _INT64,
            cache,
            _POINTER,
            _POINTER,
            *[_INT64] * 4,
            _FLOAT,
            _FLOAT,
            _INT64,
            _INT,
        ]
        _declare(library.pdserve_attention, *attention)
        _declare(library.pdserve_rms_norm, *[_POINTER] * 3, _INT64, _INT64, _FLOAT, _INT)
        _declare(library.pdserve_silu_mul, _POINTER, _POINTER, _INT64, _INT64, _INT)
        _declare(library.pdserve_layers, _POINTER, _POINTER, _INT64)
        rope: list[type[Any]] = [_POINTER, _INT64, _POINTER, _POINTER, _INT64, cache, _POINTER, *[_INT64] * 4, _INT]
        _declare(library.pdserve_rope_store, *rope)
        _declare(library.pdserve_sample, _POINTER, _INT64, _POINTER, _INT64, _INT64, _POINTER, _POINTER, _INT64, _INT)

    @classmethod
    def load(cls, num_threads: int, *, is_int8: bool = False) -> "CpuKernels | None":
        """Return the kernels built for the best instruction set that this processor has, or None."""
        capability = torch.backends.cpu.get_cpu_capability()
        for name in _BY_CAPABILITY.get(capability, ("generic",)):
            for suffix in importlib.machinery.EXTENSION_SUFFIXES:
                path = Path(__file__).with_name(f"cpu_{name}{suffix}")
                if path.exists() and runs_here(library := ctypes.CDLL(str(path))):
                    return cls(library, num_threads, is_int8=is_int8)
        return None

    def share_cores(self, descriptor: int, size_bytes: int, num_cores: int) -> None:
        """Use only a part of `num_cores`: divided by how many bytes of a file are 1, looked at for each operation.

        The file has at most 64 bytes and is mapped for the life of the process.
        """
        if self._library.pdserve_share_cores(descriptor, size_bytes, num_cores):
            raise OSError("the file cannot be mapped")

    @property
    def threads_now(self) -> int:
        """How many threads the next operation would use."""
        return int(self._library.pdserve_threads_now(self._num_threads))

    def pack(self, weight: Tensor) -> Weight:  # [out_features, in_features] float32
        """Lay a weight out for `linear`; the original is not needed any more."""
        if self._is_int8:
            return PackedInt8Weight.of(weight, self.lanes, self._inputs)
        return PackedWeight.of(weight, self.lanes)

    def pack_unrounded(self, weight: Tensor) -> Weight:  # [out_features, in_features] float32
        """Lay a weight out for `linear` in float32, whatever others are packed as."""
        return PackedWeight.of(weight, self.lanes)

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:  # [num_tokens, hidden_size]
        """Return rows of the embedding; packed if it is the output head too."""
        return weight.index_select(0, token_ids).float() if isinstance(weight, Tensor) else weight.rows(token_ids)

    def linear(
        self,
        rows: Tensor,  # [num_rows, in_features] float32, unit stride in the last dimension
        weight: Weight,  # packed
        bias: Tensor | None,  # [out_features] float32
    ) -> Tensor:  # [num_rows, out_features]
        """y = x W^T + bias, each output accumulated over the inputs in order, or exactly in integers."""
        assert isinstance(weight, (PackedWeight, PackedInt8Weight))
        _expect(rows.dtype is _FLOAT32 and rows.size(1) == weight.in_features and rows.stride(1) == 1, "rows", rows)
        _expect(
            bias is None or (bias.dtype is _FLOAT32 and bias.numel() == weight.out_features and bias.is_contiguous()),
            "bias",
            bias,
        )
        if isinstance(weight, PackedInt8Weight):
            return self._int8_linear(rows, weight, bias)
        y = torch.empty(rows.shape[0], weight.out_features)
        self._library.pdserve_linear(
            rows.data_ptr(),
            rows.stride(0),
            weight.panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            weight.out_features,
            rows.shape[0],
            weight.out_features,
            weight.in_features,
            self._num_threads,
        )
        return y

    def _int8_linear(self, rows: Tensor, weight: PackedInt8Weight, bias: Tensor | None) -> Tensor:
        y = torch.empty(rows.shape[0], weight.out_features)
        self._library.pdserve_int8_linear(
            rows.data_ptr(),
            rows.stride(0),
            weight.panels.data_ptr(),
            weight.scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            weight.out_features,
            rows.shape[0],
            weight.out_features,
            weight.in_features,
            self._num_threads,
        )
        return y

    def prepare(self, spans: Sequence[AttentionSpan]) -> "PackedSpans":
        """Lay the spans of a batch out for `attention`."""
        return PackedSpans(spans)

    def attention(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim] float32, heads contiguous
        kv_blocks: Tensor,  # [num_blocks, 2, num_kv_heads, block_size, row_elements], one layer of the cache
        spans: "PackedSpans",
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:  # [num_tokens, num_heads, head_dim]
        """Causal attention that reads the blocks where they lie."""
        _expect_cache(kv_blocks, query.size(2))
        _expect(
            query.dtype is _FLOAT32 and _lie_together(query) and not query.size(1) % kv_blocks.size(2), "query", query
        )
        output = torch.empty(query.shape)
        self._library.pdserve_attention(
            query.data_ptr(),
            query.stride(0),
            RowCache.of(kv_blocks),
            output.data_ptr(),
            spans.table.data_ptr(),
            spans.table.shape[0],
            query.shape[1],
            kv_blocks.shape[2],
            query.shape[2],
            scale,
            soft_cap or 0.0,
            window or 0,
            self._num_threads,
        )
        return output

    def rms_norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """y = weight * x / sqrt(mean(x^2) + eps) for each row x of rows [num_rows, size]."""
        _expect(rows.dtype is _FLOAT32 and rows.is_contiguous(), "rows", rows)
        _expect(
            weight.dtype is _FLOAT32 and weight.numel() == rows.size(1) and weight.is_contiguous(), "weight", weight
        )
        y = torch.empty_like(rows)
        num_rows, size = rows.shape
        self._library.pdserve_rms_norm(
            rows.data_ptr(), weight.data_ptr(), y.data_ptr(), num_rows, size, eps, self._num_threads
        )
        return y

    def norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The same of heads [num_tokens, ..., size] in torch, whose sums are of one row too."""
        return rms_norm(heads, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:  # [num_rows, 2 * size] -> [num_rows, size]
        """y = silu(gate) * up, where a row is [gate, up]."""
        _expect(gate_up.dtype is _FLOAT32 and gate_up.is_contiguous() and not gate_up.size(1) % 2, "gate_up", gate_up)
        size = gate_up.shape[1] // 2
        y = torch.empty(gate_up.shape[0], size)
        self._library.pdserve_silu_mul(gate_up.data_ptr(), y.data_ptr(), gate_up.shape[0], size, self._num_threads)
        return y

    def rope_store(
        self,
        heads: Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim] float32; rotated in place
        rotation: tuple[Tensor, Tensor] | None,  # cosines and sines, each [num_tokens, rotary_dim / 2] float32
        kv_blocks: Tensor,  # [num_blocks, 2, num_kv_heads, block_size, row_elements], one layer of the cache
        slot_mapping: Tensor,  # [num_tokens] int64; negative: a padded row, not written
    ) -> Tensor:  # [num_tokens, num_heads, head_dim], a view of heads
        """Rotate queries and keys in place, write keys and values into their slots, return the queries."""
        num_tokens, all_heads, head_dim = heads.shape
        num_kv_heads = kv_blocks.size(2)
        cos, sin = (None, None) if rotation is None else rotation
        half = 0 if cos is None else cos.size(1)
        _expect_cache(kv_blocks, head_dim)
        _expect(heads.dtype is _FLOAT32 and _lie_together(heads), "heads", heads)
        _expect(_are_slots(slot_mapping, num_tokens), "slot_mapping", slot_mapping)
        for each in rotation or ():
            is_fitting = each.numel() == num_tokens * half and 2 * half <= head_dim
            _expect(is_fitting and each.dtype is _FLOAT32 and each.is_contiguous(), "rotation", each)
        self._library.pdserve_rope_store(
            heads.data_ptr(),
            heads.stride(0),
            None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(),
            half,
            RowCache.of(kv_blocks),
            slot_mapping.data_ptr(),
            num_tokens,
            all_heads - 2 * num_kv_heads,
            num_kv_heads,
            head_dim,
            self._num_threads,
        )
        return heads[:, : all_heads - 2 * num_kv_heads]

    def fuse(self, layer: GatedLayer) -> FusedLayer | None:
        """Lay a layer out for `run_layers`; None if it has to be run operation by operation."""
        return FusedLayer.of(layer)

    def run_layers(
        self,
        layers: Sequence[FusedLayer],
        hidden: Tensor,  # [num_tokens, hidden_size] float32, changed in place
        rotations: Sequence[tuple[Tensor, Tensor] | None],  # of each layer
        kv_layers: Sequence[Tensor],  # of each: [num_blocks, 2, num_kv_heads, block_size, row_elements]
        slot_mapping: Tensor,
        spans: "PackedSpans",
    ) -> None:
        """Run whole layers: the bits of their operations one by one, without their cost in Python.

        It is one call, so the interpreter's lock is let go and waited for once.
        """
        _expect(hidden.dtype is _FLOAT32 and hidden.is_contiguous(), "hidden", hidden)
        _expect(_are_slots(slot_mapping, hidden.size(0)), "slot_mapping", slot_mapping)
        if self._steps is None or not self._steps.are_of(layers, kv_layers):
            self._steps = LayerSteps(layers, kv_layers, self._num_threads)
        steps = self._steps
        steps.fill(hidden, rotations, slot_mapping, spans.table)
        self._library.pdserve_layers(steps.addresses, steps.steps, len(layers))

    def sample(self, logits: Tensor, rows: int, top_ids: int, top_logprobs: int, max_top: int) -> None:
        """Answer rows as `cpu_sampling.h` lays them out, at the address `rows`, in place (see `CompiledRowSampler`)."""
        num_rows, size = logits.shape
        first, stride = logits.data_ptr(), logits.stride(0)
        self._library.pdserve_sample(
            rows, num_rows, first, stride, size, top_ids, top_logprobs, max_top, self._num_threads
        )


class PackedSpans:
    """The spans of a batch as the kernel reads them; keeps the block tables alive."""

    __slots__ = ("spans", "table")

    def __init__(self, spans: Sequence[AttentionSpan]) -> None:
        self.spans = spans
        if isinstance(spans, FlatSpans):
            places, address, size = array("q", spans.places), spans.tables.data_ptr(), spans.tables.itemsize
            for index in range(3, len(places), 4):
                places[index] = address + size * places[index]
        else:
            places = array("q")
            for span in spans:
                table = span.block_table
                _expect(table.dtype is torch.int64 and table.is_contiguous(), "block_table", table)
                places.extend((span.query_start, span.query_len, span.context_len, table.data_ptr()))
        self.table = torch.frombuffer(places, dtype=torch.int64).view(-1, 4) if places else torch.empty(0, 4)


def runs_here(library: ctypes.CDLL) -> bool:
    """Return whether this processor has the instructions of a build."""
    return bool(library.pdserve_runs_here())


def _expect(is_right: bool, name: str, tensor: Tensor | None) -> None:
    """Refuse what the kernels would read or write beyond its end: they know addresses only.

    Raises:
        ValueError: it is not as the signature says.
    """
    if not is_right:
        found = "" if tensor is None else f": got {tuple(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}"
        raise ValueError(f"{name}: not what the kernels take{found}")


def _expect_cache(kv_blocks: Tensor, head_dim: int) -> None:
    dtype = kv_blocks.dtype
    is_fitting = dtype in ROW_FORMATS and kv_blocks.size(4) == row_elements(head_dim, dtype)
    _expect(is_fitting and _lie_together(kv_blocks), "kv_blocks", kv_blocks)


def _are_slots(slot_mapping: Tensor, num_tokens: int) -> bool:
    return slot_mapping.dtype is torch.int64 and slot_mapping.numel() == num_tokens and slot_mapping.is_contiguous()


def _lie_together(heads: Tensor) -> bool:
    """Return whether rows [..., num_rows, size] follow one another; the kernels know no other strides."""
    return heads.stride(-1) == 1 and (heads.stride(-2) == heads.size(-1) or heads.size(-2) == 1)


def _declare(function: Any, *arguments: type[Any]) -> None:
    function.argtypes = arguments
    function.restype = None
