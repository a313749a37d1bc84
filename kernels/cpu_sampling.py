"""Compiled sampling (`cpu_sampling.h`) for all rows of a batch in one call, on the threads of the other kernels."""

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
_TOKEN_FIELD = 9  # of it, in words of 8 bytes
_LOGPROB = Struct("=d")  # its last field
_EDITS = Struct("=QQqQQqQqQ4f")  # RowEdits
_SAMPLE, _NOT_FINITE = -1, -2
_NOTHING_SEEN = SeenTokens()
_NO_IDS, _NO_BIASES = array("i"), array("f")


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
        edits = [None if request.edits is None else _PackedEdits(request.edits, size) for request in requests]
        rows = array("q", _packed(requests, edits, size))
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


def _packed(requests: Sequence[RowRequest], edits: Sequence["_PackedEdits | None"], size: int) -> bytes:
    rows, last, row = [], None, b""
    for request, edit in zip(requests, edits, strict=True):
        if request is not last:  # greedy requests are often the same
            row = _ROW.pack(
                0,  # where the logits lie, which the kernel knows
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
            last = request
        rows.append(row)
    return b"".join(rows)


class _PackedEdits:
    """Edits as the kernel reads them; keeps what they point to alive."""

    __slots__ = ("_kept", "address")

    def __init__(self, edits: LogitEdits, size: int) -> None:
        bias_ids, biases = _NO_IDS, _NO_BIASES
        if edits.biases:
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
        self._kept = (array("q", packed), bias_ids, biases, seen, allowed_ids, banned)
        self.address = _address(self._kept[0])


def _address(numbers: "array[int] | array[float]") -> int:
    return numbers.buffer_info()[0]


def choose_row_sampler(num_threads: int, *, use_cpu_kernels: bool) -> RowSampler:
    """Return the compiled sampler where it is built, else the reference."""
    kernels = CpuKernels.load(num_threads) if use_cpu_kernels else None
    return sample_rows if kernels is None else CompiledRowSampler(kernels)
