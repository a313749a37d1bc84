"""Rows of logits answered where they lie, in one launch; what that cannot answer goes to the host."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from pdserve.kernels.sampling import SEED_MASK, RowAnswer, RowRequest, RowSampler
from pdserve.kernels.triton.sampling import NOT_FINITE, EditedRows, SamplingRows, sample


class DeviceRowSampler:
    """A `RowSampler` of logits on a device: of a row only its token comes to the host.

    Rows of which logprobs are wanted, or that a grammar bans ids of, are copied and answered by `on_host`.
    """

    def __init__(self, on_host: RowSampler) -> None:
        self._on_host = on_host

    def __call__(self, logits: Tensor, requests: Sequence[RowRequest]) -> list[RowAnswer]:
        """Answer each row of `logits` [num_rows, num_ids] float32; rows with edits are changed."""
        here = [index for index, each in enumerate(requests) if _is_for_device(each)]
        there = [index for index, each in enumerate(requests) if not _is_for_device(each)]
        answers: dict[int, RowAnswer] = {}
        if there:
            copied = (logits if not here else logits[there]).cpu()
            answers |= zip(there, self._on_host(copied, [requests[index] for index in there]), strict=True)
        if here:
            own = [requests[index] for index in here]
            with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
                answers |= zip(here, _sampled(logits if not there else logits[here], own), strict=True)
        return [answers[index] for index in range(len(requests))]


def _is_for_device(request: RowRequest) -> bool:
    has_mask = request.edits is not None and request.edits.banned is not None
    return request.num_top is None and request.token_id is None and not has_mask


def _sampled(logits: Tensor, requests: Sequence[RowRequest]) -> list[RowAnswer]:
    device = logits.device
    reals = torch.tensor([(each.temperature, each.top_p, each.min_p) for each in requests], dtype=torch.float64)
    seeds = torch.tensor([each.seed & SEED_MASK for each in requests], dtype=torch.uint64).view(torch.int64)
    positions = torch.tensor([each.position for each in requests], dtype=torch.int64)
    temperatures, top_p, min_p = reals.T.contiguous().to(device)
    top_k = torch.tensor([each.top_k for each in requests], dtype=torch.int32).to(device)
    rows = SamplingRows(temperatures, top_k, top_p, min_p, seeds.to(device), positions.to(device))
    edits = None
    if any(each.edits is not None for each in requests):
        edits = EditedRows.of([each.edits for each in requests], logits.shape[1], device)
    return [
        RowAnswer(token_id) if token_id >= 0 else RowAnswer(None, is_finite=token_id != NOT_FINITE)
        for token_id in sample(logits, rows, edits).tolist()
    ]
