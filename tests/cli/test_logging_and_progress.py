"""What people and machines read of a process: log lines and progress lines, as text or as JSON."""

import io
import json
import logging
import os
import sys

import pytest

from pdserve.cli.logging_setup import JsonFormatter, TextFormatter
from pdserve.cli.progress import ProgressPrinter


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    entry = logging.LogRecord("pdserve.gateway", logging.INFO, "file.py", 1, message, arguments, None)
    entry.__dict__.update(extra)
    return entry


def test_json_line_has_the_request_id_as_a_field() -> None:
    line = json.loads(JsonFormatter().format(record("took %d ms", 5, request_id="r-1")))

    assert line["message"] == "took 5 ms"
    assert line["request_id"] == "r-1"
    assert line["level"] == "info"
    assert line["logger"] == "pdserve.gateway"
    assert line["time"].endswith("Z")


def test_json_line_without_request_has_no_such_field() -> None:
    assert "request_id" not in json.loads(JsonFormatter().format(record("up")))


def test_json_of_an_exception_stays_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        entry = record("failed")
        entry.exc_info = sys.exc_info()

    formatted = JsonFormatter().format(entry)

    assert "\n" not in formatted
    assert "ValueError: two\nlines" in json.loads(formatted)["exception"]


def test_text_line_ends_with_the_request_id() -> None:
    formatter = TextFormatter("%(levelname)s %(message)s")

    assert formatter.format(record("up", request_id="r-1")) == "INFO up [request_id=r-1]"
    assert formatter.format(record("up")) == "INFO up"


def test_progress_lines_carry_the_name_of_the_process() -> None:
    stream = io.StringIO()
    printer = ProgressPrinter("text", stream)

    printer.say("one\ntwo")
    printer.echo("decode-1", "three")
    printer.plain("curl")

    assert stream.getvalue() == "pdserve   | one\npdserve   | two\ndecode-1  | three\ncurl\n"


def test_json_progress_is_json_on_every_line() -> None:
    stream = io.StringIO()
    printer = ProgressPrinter("json", stream)

    printer.say("one")
    printer.echo("decode-1", '{"message": "two"}')
    printer.echo("decode-1", "three")
    printer.plain("four")

    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines] == ["one", "two", "three", "four"]
    assert [line["process"] for line in lines] == ["pdserve", "decode-1", "decode-1", "pdserve"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_closed_output_does_not_end_the_printer() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w")
    printer = ProgressPrinter("text", stream)

    printer.say("one")
    printer.say("two")

    with pytest.raises(BrokenPipeError):
        stream.close()
