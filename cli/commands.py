"""The subcommands of `pdserve`: reads the command line and the environment, then runs one.

Heavy modules are imported by the subcommand that needs them: help texts and wrong values answer at once.
"""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from pdserve.cli.parser import ParsedLine, parse_line
from pdserve.cli.setting_sources import resolve_settings
from pdserve.cli.setting_spec import Command
from pdserve.cli.settings import Settings


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one subcommand and return its exit code.

    Raises:
        PdserveError: it cannot run; the text is for the person who typed the command.
    """
    line = parse_line(arguments)
    if line.command == "models":
        return _fetch(line)
    if line.command == "keys":
        return _print_api_key(line) if line.flags["action"] == "api" else _generate_key(line)
    if line.command == "estimate":
        return _estimate(line)
    if line.command == "bench":
        return _bench(line, environment)
    if line.command == "config-reference":
        return _print_reference()
    command = Command(line.command)
    settings = resolve_settings(command, line.flags, environment, line.config_path)
    if command is Command.SERVE:
        return _serve(settings, environment)
    if command is Command.GENERATE:
        return _generate(settings, line.prompts)
    if command is Command.HEALTH:
        return _ask_health(settings)
    if command is Command.DOCTOR:
        return _run_doctor(settings)
    return _run_process(command, settings)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fetch(line: ParsedLine) -> int:
    from pdserve.engine.model_source import resolve_model

    print(resolve_model(line.flags.get("model"), progress=_say))
    return 0


def _generate_key(line: ParsedLine) -> int:
    from pdserve.cli.transfer_key import create_transfer_key

    path = Path(line.flags["file"])
    if create_transfer_key(path):
        _say(f"{path} holds a new key; give a copy of it to every node, as --transfer-key-file")
    else:
        _say(f"{path} holds a key already; it is left as it is")
    return 0


def _print_api_key(line: ParsedLine) -> int:
    from pdserve.cli.http_access import new_api_key

    secret, entry = new_api_key(line.flags["file"])
    _say("this key is shown once; its entry, on standard output, is for --api-keys-file:")
    _say(f"  {secret}")
    print(entry)
    return 0


def _estimate(line: ParsedLine) -> int:
    from pdserve.cli.estimate import estimate

    print(estimate(line.flags, progress=_say))
    return 0


def _bench(line: ParsedLine, environment: Mapping[str, str]) -> int:
    from pdserve.cli.bench import bench

    return bench(line.flags, environment, progress=_say)


def _print_reference() -> int:
    from pdserve.cli.reference import settings_reference

    print(settings_reference())
    return 0


def _serve(settings: Settings, environment: Mapping[str, str]) -> int:
    from pdserve.cli.progress import ProgressPrinter
    from pdserve.cli.serve import serve

    return serve(settings, ProgressPrinter(settings.log_format), environment)


def _generate(settings: Settings, prompts: Sequence[str]) -> int:
    from pdserve.cli.generate import generate
    from pdserve.cli.logging_setup import set_up_logging

    set_up_logging(level=settings.log_level, log_format=settings.log_format)
    return generate(settings, prompts, progress=_say)


def _ask_health(settings: Settings) -> int:
    from pdserve.cli.node_health import ask_nodes

    return ask_nodes(settings, progress=_say)


def _run_doctor(settings: Settings) -> int:
    from pdserve.cli.doctor import run_doctor
    from pdserve.cli.logging_setup import set_up_logging

    set_up_logging(level=settings.log_level, log_format=settings.log_format)
    return run_doctor(settings, say=_say)


def _run_process(command: Command, settings: Settings) -> int:
    from pdserve.cli import processes
    from pdserve.cli.logging_setup import set_up_logging

    set_up_logging(level=settings.log_level, log_format=settings.log_format)
    if command is Command.GATEWAY:
        return processes.run_gateway(settings, _say)
    run_node = processes.run_prefill if command is Command.PREFILL else processes.run_decode
    _end_at_once(run_node(settings, _say))


def _end_at_once(code: int) -> NoReturn:
    """Exit without the interpreter's own tidying, in which torch spends more than a second of CPU time.

    All that matters to others was closed before.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
