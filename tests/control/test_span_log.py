import json
from pathlib import Path

import pytest

from pdserve.control import span_log
from pdserve.control.span_log import SpanLog
from pdserve.kvtransfer.spans import Side, TransferSpan


def _span(transfer_id: str, label: str = "") -> TransferSpan:
    return TransferSpan(transfer_id, label, Side.RECEIVER, "p", "done", 0.1, 0.2, None, 0.5, 3, 300)


async def test_each_span_is_a_line_with_the_request_it_belongs_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_log, "_CLOSE_TIMEOUT_S", 30.0)
    path = tmp_path / "spans.jsonl"
    path.write_text('{"of": "an earlier start"}\n')

    async with SpanLog.open("d", str(path), clock=lambda: 1000.5) as log:
        log.label("t1", "request-1")
        assert log.hook is not None
        for span in (_span("t1"), _span("t2", "request-2"), _span("t3")):
            log.hook(span)

    earlier, *lines = map(json.loads, path.read_text().splitlines())
    assert earlier == {"of": "an earlier start"}
    assert [line["request_id"] for line in lines] == ["request-1", "request-2", None]
    assert lines[0] == {
        "ended_at_unix_s": 1000.5,
        "node_id": "d",
        "request_id": "request-1",
        "transfer_id": "t1",
        "side": "receiver",
        "peer": "p",
        "outcome": "done",
        "grant_s": 0.1,
        "first_block_s": 0.2,
        "tail_s": None,
        "total_s": 0.5,
        "num_blocks": 3,
        "num_bytes": 300,
    }


async def test_more_spans_than_the_queue_holds_are_counted_and_not_waited_for(tmp_path: Path) -> None:
    async with SpanLog.open("d", str(tmp_path / "spans.jsonl")) as log:
        for number in range(5_000):
            log.label(f"never told {number}", "r")
            log.tell(_span(f"t{number}"))
        assert log.num_dropped == 5_000 - 4_096


async def test_without_a_path_nothing_is_told() -> None:
    async with SpanLog.open("d", None) as log:
        assert log.hook is None


async def test_a_file_that_cannot_be_opened_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        async with SpanLog.open("d", str(tmp_path)):
            pass
