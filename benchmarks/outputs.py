"""Where a benchmark is told to write: types for argparse, which refuse what cannot be written before anything runs."""

import argparse
from pathlib import Path

from pdserve.cli.errors import SettingError
from pdserve.cli.file_check import check_output


def output_file(text: str) -> Path:
    """Return the path of a file that can be written; its folder is there."""
    return _checked(text, is_made=False)


def output_folder(text: str) -> Path:
    """Return the path of a folder that can be written or made."""
    return _checked(text, is_made=True)


def _checked(text: str, *, is_made: bool) -> Path:
    try:
        check_output("path", text, is_made=is_made)
    except SettingError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)
