"""Whether the files that a command will write to can be written, asked before anything slow is started."""

import os
import tempfile
from pathlib import Path

from pdserve.cli.errors import SettingError
from pdserve.cli.settings import Settings


def check_files(settings: Settings) -> None:
    """Look at the path of each setting that names a file or directory of a node's.

    Raises:
        SettingError: one cannot be written.
    """
    check_output("--transfer-spans-file", settings.transfer_spans_file)
    check_output("--core-share-file", settings.core_share_file)
    check_output("--kv-disk-dir", settings.kv_disk_dir, is_made=True)


def check_output(flag: str, text: str | None, *, is_made: bool = False) -> None:
    """Look at one path, of a file or of a folder that is made when it is missing (`is_made`).

    Raises:
        SettingError: it cannot be written.
    """
    if text is None:
        return
    try:
        _refuse_unwritable(flag, text, is_made)
    except OSError as error:  # a folder that this user may not look into, or a name that is too long
        raise SettingError(f"{flag}: {text!r} cannot be used ({error.strerror}); give another path") from None


def _refuse_unwritable(flag: str, text: str, is_made: bool) -> None:
    """Refuse what cannot be written; the folders above are there already, unless they are made (`is_made`)."""
    path = Path(text)
    if path.is_dir() and not is_made:
        raise SettingError(f"{flag}: {text!r} is a directory; give the path of a file")
    existing = path
    while not existing.exists() and existing != existing.parent and (is_made or existing == path):
        existing = existing.parent
    if not existing.exists():
        raise SettingError(
            f"{flag}: there is no directory {str(existing)!r} for {text!r}; make it, or give another path"
        )
    if (existing != path and not existing.is_dir()) or (is_made and not existing.is_dir()):
        raise SettingError(f"{flag}: {str(existing)!r} is not a directory; give another path than {text!r}")
    if not os.access(existing, os.W_OK):
        raise SettingError(f"{flag}: {str(existing)!r} cannot be written by this user; give another path than {text!r}")
    if existing.is_dir():  # root may do everything, says access: /proc takes no file all the same
        with tempfile.TemporaryFile(dir=existing):
            pass
