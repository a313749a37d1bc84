"""What `pdserve serve` prints: its own lines and its children's, each under the name of who says it."""

import json
import sys
from typing import TextIO

SUPERVISOR = "pdserve"
_NAME_WIDTH = 9


class ProgressPrinter:
    """Writes one line at a time; in "json" format each is an object, and a child's JSON gets its name."""

    def __init__(self, log_format: str, stream: TextIO | None = None) -> None:
        self._is_json = log_format == "json"
        self._stream = sys.stdout if stream is None else stream
        self._is_open = True

    def say(self, message: str) -> None:
        """Print a message of the supervisor itself."""
        for line in message.splitlines() or [""]:
            self.echo(SUPERVISOR, line)

    def echo(self, name: str, line: str) -> None:
        """Print one line of the process `name`."""
        if not self._is_json:
            self._write(f"{name:<{_NAME_WIDTH}} | {line}")
        elif line.startswith('{"'):
            self._write(f'{{"process": {json.dumps(name)}, {line[1:]}')
        else:
            self._write(json.dumps({"process": name, "message": line}, ensure_ascii=False))

    def plain(self, text: str) -> None:
        """Print text that is meant to be copied: no name before it, except in JSON."""
        if self._is_json:
            self.say(text)
        else:
            self._write(text)

    def _write(self, line: str) -> None:
        if not self._is_open:
            return
        try:
            print(line, file=self._stream, flush=True)
        except BrokenPipeError:
            self._is_open = False  # nobody reads any more, which is no reason to stop serving
