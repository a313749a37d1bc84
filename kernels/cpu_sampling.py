"""Compiled sampling (`cpu_sampling.h`) for all rows of a batch in one call, on the threads of the other kernels."""

import ctypes
from array import array
from collections.abc import Sequence
from struct import Struct

import torch
from torch import Tensor

from pdserve.kernels.cpu import CpuKernels
from pdserve.kernels.logit_edits import LogitEdits
from pdserve.kernels.sampling import SEED_MASK, RowAnswer, RowRequest, RowSampler, sample_rows
from pdserve.kernels.seen_tokens import SeenTokens

_ROW = Struct("=qqdddqQQqqd")  # SamplingRow
_ANSWER = Struct("=qd")  # its last two fields
_EDITS = Struct("=QQqQQqQqQ4f")  # RowEdits
_SAMPLE, _NOT_FINITE = -1, -2
_NOTHING_SEEN = SeenTokens()


class CompiledRowSampler:
    """A `RowSampler` with the results of the reference."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def __call__(self, logits: Tensor, requests: Sequence[RowRequest]) -> list[RowAnswer]:
        """Answer each row of `logits` [num_rows, num_ids] float32."""
        assert logits.dtype is torch.float32 and logits.stride(1) == 1 and logits.shape[0] == len(requests)
        if logits.stride(0) < logits.shape[1]:
            logits = logits.contiguous()  # rows are edited in place, each by its own thread
        size, stride, first = logits.shape[1], logits.stride(0) * logits.itemsize, logits.data_ptr()
        rows = bytearray(_ROW.size * len(requests))
        edits = [None if request.edits is None else _PackedEdits(request.edits, size) for request in requests]
        for index, (request, edit) in enumerate(zip(requests, edits, strict=True)):
            _ROW.pack_into(
                rows,
                _ROW.size * index,
                first + index * stride,
                0 if edit is None else edit.address,
                request.temperature,
                request.top_p,
                request.min_p,
                request.top_k,
                request.seed & SEED_MASK,
                request.position,
                -1 if request.num_top is None else min(request.num_top, size),
                _SAMPLE if request.token_id is None else request.token_id,
                0.0,
            )
        max_top = max((min(request.num_top or 0, size) for request in requests), default=0)
        ids = (ctypes.c_int64 * (max_top * len(requests)))()
        logprobs = (ctypes.c_double * (max_top * len(requests)))()
        self._kernels.sample((ctypes.c_char * len(rows)).from_buffer(rows), len(requests), size, ids, logprobs, max_top)
        answers = []
        for index, request in enumerate(requests):
            token_id, logprob = _ANSWER.unpack_from(rows, _ROW.size * (index + 1) - _ANSWER.size)
            if token_id < 0:
                answers.append(RowAnswer(None, is_finite=token_id != _NOT_FINITE))
            elif request.num_top is None:
                answers.append(RowAnswer(token_id))
            else:
                start = max_top * index
                own = slice(start, start + min(request.num_top, size))
                answers.append(RowAnswer(token_id, logprob, tuple(zip(ids[own], logprobs[own], strict=True))))
        return answers


class _PackedEdits:
    """Edits as the kernel reads them; keeps what they point to alive."""

    __slots__ = ("_kept", "address")

    def __init__(self, edits: LogitEdits, size: int) -> None:
        bias_ids = array("i", [token_id for token_id, _ in edits.biases])
        biases = array("f", [bias for _, bias in edits.biases])
        seen = _NOTHING_SEEN if edits.seen is None else edits.seen
        allowed_ids = None if edits.allowed_ids is None else array("i", edits.allowed_ids)
        banned = edits.banned
        if banned is not None:
            assert banned.dtype is torch.bool and banned.shape == (size,) and banned.is_contiguous()
        packed = _EDITS.pack(
            *(_address(bias_ids), _address(biases), len(biases)),
            *(_address(seen.token_ids), _address(seen.counts), len(seen.counts)),
            *((0, -1) if allowed_ids is None else (_address(allowed_ids), len(allowed_ids))),
            0 if banned is None else banned.data_ptr(),
            *(edits.repetition, edits.presence, edits.frequency, 0.0),
        )
        self._kept = (ctypes.create_string_buffer(packed), bias_ids, biases, seen, allowed_ids, banned)
        self.address = ctypes.addressof(self._kept[0])


def _address(numbers: "array[int] | array[float]") -> int:
    return numbers.buffer_info()[0]


def choose_row_sampler(num_threads: int, *, use_cpu_kernels: bool) -> RowSampler:
    """Return the compiled sampler where it is built, else the reference."""
    kernels = CpuKernels.load(num_threads) if use_cpu_kernels else None
    return sample_rows if kernels is None else CompiledRowSampler(kernels)
