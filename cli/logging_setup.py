"""Configures logging of one process: lines for people or one JSON object a line, on standard error.

A record made with `extra={"request_id": ...}` carries the id as a field of its own.
"""

import json
import logging
import sys
import time

_TEXT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
_TIME = "%H:%M:%S"


def set_up_logging(*, level: str, log_format: str) -> None:
    """Send every record of `level` and above to standard error in `log_format` ("text" or "json")."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(_TEXT, _TIME))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    # No format here shows them, and they are half of what a record costs (the logging HOWTO, "Optimization").
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    logging.getLogger("torch").setLevel(logging.WARNING)  # it tells of its own caches at INFO


class TextFormatter(logging.Formatter):
    """One line an event; the request id stands at the end of the message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        request_id = getattr(record, "request_id", None)
        return f"{line} [request_id={request_id}]" if request_id else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and request_id, exception if present."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", None):
            line["request_id"] = str(request_id)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
