"""Steps that nobody asked for, run before the first that somebody did: to measure, to compile, to capture."""

import torch

from pdserve.engine.model_input import ModelInput
from pdserve.kernels.attention import AttentionSpan


def largest_step(num_tokens: int, num_rows: int, block_size: int) -> ModelInput:
    """Return a prompt chunk of `num_tokens` from whose last token `num_rows` are sampled; it writes to block 0 only."""
    positions = torch.arange(num_tokens)
    table = torch.zeros(-(-num_tokens // block_size), dtype=torch.int64)
    return ModelInput(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=positions,
        rope_lengths=positions + 1,
        slot_mapping=positions % block_size,
        spans=(AttentionSpan(0, num_tokens, num_tokens, table),),
        sample_rows=torch.full((num_rows,), num_tokens - 1),
    )


def mixed_step(block_size: int) -> ModelInput:
    """Return a prompt chunk of two tokens beside the one token of another sequence; it writes to block 0 only."""
    positions = torch.tensor([0, 1, 0])
    table = torch.zeros(-(-2 // block_size), dtype=torch.int64)
    return ModelInput(
        token_ids=torch.zeros(3, dtype=torch.int64),
        positions=positions,
        rope_lengths=positions + 1,
        slot_mapping=positions % block_size,
        spans=(AttentionSpan(0, 2, 2, table), AttentionSpan(2, 1, 1, table[:1])),
        sample_rows=torch.tensor([1, 2]),
    )
