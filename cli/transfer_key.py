"""The secret key that gateways and nodes of an installation share, in a file or a variable: made once, read at start.

The key itself is in no message and no log.
"""

import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.cli.errors import CliError, SettingError

if TYPE_CHECKING:
    from pdserve.kvtransfer.curve_keys import CurveKeys

_MAX_FILE_BYTES = 4096
_OWNER_ONLY = 0o600
_MAKE_ONE = "make one with `pdserve keys generate FILE`"
_TAKE_ANOTHER = "name another file, or remove this one first"


def load_transfer_keys(file: str | None, key: str | None = None) -> "CurveKeys | None":
    """Return the keys that `file` holds or that belong to the secret `key`; None if neither is given.

    Raises:
        SettingError: the file cannot be read, others can read it, or it holds something else; or both are given.
    """
    from pdserve.kvtransfer.curve_keys import CurveKeys

    if key is not None and file is not None:
        raise SettingError("--transfer-key and --transfer-key-file are both given; one of them is enough")
    if key is not None:
        try:
            return CurveKeys.from_secret(key.strip())
        except ValueError:
            raise SettingError(
                f"--transfer-key (env PDSERVE_TRANSFER_KEY): not a key of 40 characters; {_MAKE_ONE}"
            ) from None
    if file is None:
        return None
    try:
        return _read(Path(file).expanduser(), _MAKE_ONE)
    except SettingError as error:
        raise SettingError(f"--transfer-key-file: {error}") from None


def create_transfer_key(path: Path) -> bool:
    """Write a new key to `path`, whole and for its owner only; return False if there is a valid one already.

    Raises:
        SettingError: there is something at `path` that is not a key.
        CliError: the file cannot be written.
    """
    from pdserve.kvtransfer.curve_keys import generate_keys

    try:
        if path.exists():
            _read(path, _TAKE_ANOTHER)
            return False
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            _write_new(draft, f"{generate_keys().secret_key}\n")
            os.link(draft, path)  # unlike a rename it never replaces a key that came meanwhile
        finally:
            draft.unlink(missing_ok=True)
    except FileExistsError:
        _read(path, _TAKE_ANOTHER)
        return False
    except OSError as error:
        raise CliError(f"cannot write {str(path)!r} ({error.strerror}); name a file in a folder of yours") from None
    return True


def _read(path: Path, remedy: str) -> "CurveKeys":
    from pdserve.kvtransfer.curve_keys import CurveKeys

    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise SettingError(f"{str(path)!r} is not a file; {remedy}")
        if status.st_mode & stat.S_IRWXO:
            raise SettingError(
                f"every user of this machine has access to {str(path)!r} (mode {stat.S_IMODE(status.st_mode):04o}); "
                f"run: chmod 600 {path}"
            )
        if status.st_size > _MAX_FILE_BYTES:
            raise SettingError(f"{str(path)!r} is too large for a key; {remedy}")
        return CurveKeys.load(path)
    except OSError as error:
        raise SettingError(f"cannot read {str(path)!r} ({error.strerror}); {remedy}") from None
    except ValueError:
        raise SettingError(f"{str(path)!r} does not hold one key, a line of 40 characters; {remedy}") from None


def _write_new(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
