"""Rows of logits answered where they lie, in one launch; what that cannot answer goes to the host."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from pdserve.kernels.sampling import RowAnswer, RowRequest, RowSampler
from pdserve.kernels.triton.sampling import sample_rows


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
                answers |= zip(here, sample_rows(logits if not there else logits[here], own), strict=True)
        return [answers[index] for index in range(len(requests))]


def _is_for_device(request: RowRequest) -> bool:
    has_mask = request.edits is not None and request.edits.banned is not None
    return request.num_top is None and request.token_id is None and not has_mask
