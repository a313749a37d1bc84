"""The `pdserve` command: from the first moment on, what ends it ends it quietly and with a code."""

import io
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from pdserve.cli.errors import CliError
from pdserve.engine.errors import PdserveError


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0, 1 for a failure, 2 for a wrong setting, 130 for Ctrl-C."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    _complete_standard_streams()
    try:
        from pdserve.cli.commands import run  # half a second on a busy machine, in which somebody may press Ctrl-C

        code = run(sys.argv[1:] if arguments is None else arguments, os.environ)
    except PdserveError as error:
        print(f"pdserve: error: {error}", file=sys.stderr)
        code = error.exit_code if isinstance(error, CliError) else 1
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(code)


def _complete_standard_streams() -> None:
    """Let no socket or file get the number of a stream that was closed at the start, and no text end the command.

    The numbers lowest first: the system gives the lowest free one.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a model writes what not every terminal can show


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """End through the `finally` blocks, until a subcommand has handlers of its own."""
    sys.exit(128 + number)
