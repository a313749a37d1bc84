"""The reference of decode attention: spans of one token, idle rows, tables that are wider than a sequence."""

import torch

from pdserve.kernels.attention import AttentionSpan, paged_attention
from pdserve.kernels.decode_attention import DecodeBatch, decode_attention

_NO_BLOCK = 2**31 - 1


def test_each_row_attends_over_its_own_table_and_idle_rows_are_zeros() -> None:
    torch.manual_seed(0)
    query, kv_blocks, slopes = torch.randn(3, 4, 40), torch.randn(5, 2, 2, 8, 40), torch.tensor([0.5, 0.2, 0.1, 0.05])
    tables = torch.tensor([[3, 0, 4], [_NO_BLOCK] * 3, [1, _NO_BLOCK, _NO_BLOCK]], dtype=torch.int32)
    batch = DecodeBatch(tables, torch.tensor([19, 0, 8], dtype=torch.int32), 19)

    output = decode_attention(query, kv_blocks, batch, 0.3, 9, 2.0, slopes)

    for row, context_len, table in ((0, 19, [3, 0, 4]), (2, 8, [1])):
        span = [AttentionSpan(0, 1, context_len, torch.tensor(table))]
        assert torch.equal(output[row], paged_attention(query[row : row + 1], kv_blocks, span, 0.3, 9, 2.0, slopes)[0])
    assert not output[1].any()
