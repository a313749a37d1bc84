"""Where the time of a transfer went, told by both ends at its end."""

import json

import pytest

from pdserve.kvtransfer import ReceiverConfig, SenderConfig, TransferRefused
from pdserve.kvtransfer.rate import RATE_WINDOW_S, RateMeter


@pytest.fixture
async def told(make_pair):
    spans = []
    pair = await make_pair(
        receiver_config=ReceiverConfig(on_span=spans.append), sender_config=SenderConfig(on_span=spans.append)
    )
    return pair, spans


async def test_both_ends_tell_the_stages_of_a_transfer(told):
    pair, spans = told
    transfer = await pair.sender.offer(pair.peer, "t1", pair.hashes(10), 10, 10.0, label="request-7")
    await transfer.send_blocks(pair.blocks())
    await transfer.finish(b"")
    await pair.receiver.idle()

    sender, receiver = sorted(spans, key=lambda span: span.side, reverse=True)
    assert (sender.side, sender.label, sender.peer, sender.outcome) == ("sender", "request-7", "decode-0", "done")
    assert (receiver.side, receiver.peer, receiver.transfer_id) == ("receiver", "prefill-0", "t1")
    for span in spans:
        assert span.num_blocks == 3 and span.num_bytes == 3 * pair.layout.block_size_bytes
        assert 0 <= span.grant_s + span.first_block_s + span.tail_s <= span.total_s
        assert json.loads(span.to_json())["outcome"] == "done"


async def test_a_transfer_that_ends_early_tells_how_far_it_came(told, refusal):
    pair, spans = told
    pair.sink.refusal = refusal
    transfer = await pair.offer("refused")
    with pytest.raises(TransferRefused):
        await transfer.granted()
    pair.sink.refusal = None
    transfer = await pair.offer("aborted")
    await transfer.granted()
    await transfer.abort("cancelled", "")
    await pair.receiver.idle()

    ends = {(span.transfer_id, span.side): span for span in spans}
    assert {key: span.outcome for key, span in ends.items()} == {
        ("refused", "sender"): "no_blocks",
        ("refused", "receiver"): "no_blocks",
        ("aborted", "sender"): "cancelled",
        ("aborted", "receiver"): "cancelled",
    }
    assert ends["refused", "sender"].grant_s is None
    assert ends["aborted", "sender"].grant_s is not None
    assert all(span.first_block_s is None and span.tail_s is None for span in spans)


def test_a_steady_rate_is_found_and_forgotten():
    meter = RateMeter()
    for second in range(100):
        meter.observe(1_000, float(second))

    assert meter.per_s(100.0) == pytest.approx(1_000, rel=0.1)
    assert meter.per_s(100.0 + 10 * RATE_WINDOW_S) < 1.0
