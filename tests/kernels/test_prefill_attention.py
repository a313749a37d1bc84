"""The reference of prefill attention: the tiles of a batch are its sequences, whatever they are cut into."""

import pytest
import torch

from pdserve.kernels.attention import AttentionSpan, paged_attention
from pdserve.kernels.prefill_attention import PrefillBatch, prefill_attention, tile_rows

_SEQUENCES = ((0, 70, 70), (71, 5, 24), (76, 33, 100))  # row 70 is nobody's


@pytest.mark.parametrize("heads_per_kv_head", [1, 3, 9, 40])
@pytest.mark.parametrize("rule", [(None, None), (9, 2.0)], ids=str)
def test_tiles_of_queries_are_the_sequences(heads_per_kv_head: int, rule: tuple[int | None, float | None]) -> None:
    torch.manual_seed(heads_per_kv_head)
    query, kv_blocks = torch.randn(109, heads_per_kv_head, 40), torch.randn(30, 2, 1, 8, 40)
    tables, slopes = torch.randperm(30).expand(3, -1), torch.rand(heads_per_kv_head)
    batch = PrefillBatch.of(tables, _SEQUENCES, heads_per_kv_head, torch.float32)
    output = torch.full_like(query, 7.0)

    assert prefill_attention(query, kv_blocks, batch, 0.3, *rule, slopes, output) is output

    for start, query_len, context_len in _SEQUENCES:
        rows = slice(start, start + query_len)
        span = [AttentionSpan(0, query_len, context_len, tables[0, : -(-context_len // 8)])]
        expected = paged_attention(query[rows], kv_blocks, span, 0.3, *rule, slopes)
        torch.testing.assert_close(output[rows], expected, atol=2e-5, rtol=0)
    assert (output[70] == 7.0).all()


def test_a_tile_has_room_for_the_heads_of_one_token() -> None:
    assert [tile_rows(torch.float32, count) for count in (1, 9, 33, 71)] == [32, 32, 64, 128]
    assert [tile_rows(torch.bfloat16, count) for count in (1, 64, 65)] == [64, 64, 128]
