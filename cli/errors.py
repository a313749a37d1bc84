"""Errors of the command line: what a person typed, or what their machine lacks.

PdserveError
└── CliError                  the command cannot go on; `exit_code` is the process's
    ├── SettingError          an unknown key or a wrong value; exit code 2
    └── ChildFailed           a process of `pdserve serve` ended before or instead of serving
"""

from pdserve.engine.errors import PdserveError


class CliError(PdserveError):
    """The command ends with `exit_code` after printing this error's text."""

    exit_code = 1


class SettingError(CliError):
    """A setting that cannot be used; the text names the key, the value and what to write instead."""

    exit_code = 2


class ChildFailed(CliError):
    """A child process ended for good; the text carries its exit code and its last lines."""
