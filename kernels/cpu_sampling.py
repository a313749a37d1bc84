"""Compiled sampling (`cpu_sampling.h`) for all rows of a batch in one call, on the threads of the other kernels."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import count
from struct import Struct

import torch
from torch import Tensor

from pdserve.kernels.cpu import CpuKernels
from pdserve.kernels.logit_edits import LogitEdits
from pdserve.kernels.sampling import SEED_MASK, RowAnswer, RowRequest, RowSampler, sample_rows

_ROW = Struct("=qqdddqQQqqd")  # SamplingRow
_TOKEN_FIELD = 9  # of it, in words of 8 bytes
_LOGPROB = Struct("=d")  # its last field
_EDITS = Struct("=QQqQQqQqQ4f")  # RowEdits
_SAMPLE, _NOT_FINITE = -1, -2
_NOTHING, _EVERYTHING = (0, 0, 0), (0, -1)  # biases or seen tokens; allowed tokens


class CompiledRowSampler:
    """A `RowSampler` with the results of the reference."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def __call__(self, logits: Tensor, requests: Sequence[RowRequest]) -> list[RowAnswer]:
        """Answer each row of `logits` [num_rows, num_ids] float32."""
        (num_rows, size), (stride, step) = logits.shape, logits.stride()
        assert logits.dtype is torch.float32 and step == 1 and num_rows == len(requests)
        if stride < size:
            logits = logits.contiguous()  # rows are edited in place, each by its own thread
        edits = _PackedEdits(requests, size)
        rows = array("q", _packed(requests, edits.addresses, size))
        max_top = min(max((each.num_top or 0 for each in requests), default=0), size)
        top_ids, top_logprobs = array("q", bytes(8 * max_top * num_rows)), array("d", bytes(8 * max_top * num_rows))
        self._kernels.sample(logits, _address(rows), _address(top_ids), _address(top_logprobs), max_top)
        answers = []
        for index, token_id in enumerate(rows[_TOKEN_FIELD :: _ROW.size // 8]):
            num_top = requests[index].num_top
            if token_id < 0:
                answers.append(RowAnswer(None, is_finite=token_id != _NOT_FINITE))
            elif num_top is None:
                answers.append(RowAnswer(token_id))
            else:
                own = slice(max_top * index, max_top * index + min(num_top, size))
                [logprob] = _LOGPROB.unpack_from(rows, _ROW.size * (index + 1) - _LOGPROB.size)
                answers.append(RowAnswer(token_id, logprob, tuple(zip(top_ids[own], top_logprobs[own], strict=True))))
        return answers


def _packed(requests: Sequence[RowRequest], edits: Sequence[int], size: int) -> bytes:
    rows, last, row = [], None, b""
    for request, edits_address in zip(requests, edits, strict=True):
        if request is not last:  # greedy requests are often the same
            row = _ROW.pack(
                0,  # where the logits lie, which the kernel knows
                edits_address,
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
            last = request
        rows.append(row)
    return b"".join(rows)


class _PackedEdits:
    """The edits of all rows as the kernel reads them; keeps what they point to alive."""

    __slots__ = ("_kept", "_packed", "addresses")

    def __init__(self, requests: Sequence[RowRequest], size: int) -> None:
        self._kept: list[object] = []
        all_edits = [request.edits for request in requests]
        self._packed = array("q", b"".join([self._pack(edits, size) for edits in all_edits if edits is not None]))
        places = count(_address(self._packed), _EDITS.size)
        self.addresses = [0 if edits is None else next(places) for edits in all_edits]

    def _pack(self, edits: LogitEdits, size: int) -> bytes:
        biases, seen, allowed, banned = _NOTHING, _NOTHING, _EVERYTHING, 0
        if edits.biases:
            values = array("f", [bias for _, bias in edits.biases])
            biases = (self._kept_ids([token_id for token_id, _ in edits.biases]), _address(values), len(values))
            self._kept.append(values)
        if edits.seen is not None:  # which the caller's request keeps
            seen = (_address(edits.seen.token_ids), _address(edits.seen.counts), len(edits.seen.counts))
        if edits.allowed_ids is not None:
            allowed = (self._kept_ids(edits.allowed_ids), len(edits.allowed_ids))
        if edits.banned is not None:
            assert edits.banned.dtype is torch.bool and edits.banned.shape == (size,) and edits.banned.is_contiguous()
            banned = edits.banned.data_ptr()
        return _EDITS.pack(
            *biases, *seen, *allowed, banned, edits.repetition, edits.presence, edits.frequency, 0.0
        )  # fmt: skip

    def _kept_ids(self, token_ids: Iterable[int]) -> int:
        ids = array("i", token_ids)
        self._kept.append(ids)
        return _address(ids)


def _address(numbers: "array[int] | array[float]") -> int:
    return numbers.buffer_info()[0]


def choose_row_sampler(num_threads: int, *, use_cpu_kernels: bool) -> RowSampler:
    """Return the compiled sampler where it is built, else the reference."""
    kernels = CpuKernels.load(num_threads) if use_cpu_kernels else None
    return sample_rows if kernels is None else CompiledRowSampler(kernels)
