"""The key file of the KV plane: made once, for its owner only, and refused by name when it is not what it should be."""

import re
import threading
from pathlib import Path

import pytest

from pdserve.cli.errors import CliError, SettingError
from pdserve.cli.transfer_key import create_transfer_key, load_transfer_keys
from pdserve.kvtransfer.curve_keys import generate_keys


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_created_key_is_its_owners_only_and_loads(tmp_path: Path) -> None:
    path = tmp_path / "key"

    assert create_transfer_key(path)

    keys = load_transfer_keys(str(path))
    assert keys is not None and keys.trusts(keys.public_key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_valid_key_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "key"
    create_transfer_key(path)
    before = path.read_text()

    assert not create_transfer_key(path)

    assert path.read_text() == before


def test_many_at_once_make_one_key(tmp_path: Path) -> None:
    path, results = tmp_path / "key", []
    threads = [threading.Thread(target=lambda: results.append(create_transfer_key(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(results) == [False] * 7 + [True]
    assert list(tmp_path.iterdir()) == [path]


def test_something_else_is_never_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "notes", "my notes\n")

    with pytest.raises(SettingError, match="does not hold one key, a line of 40 characters; name another file"):
        create_transfer_key(path)

    assert path.read_text() == "my notes\n"


def test_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"cannot write '.*/no/key' \(No such file or directory\)"):
        create_transfer_key(tmp_path / "no" / "key")


def test_no_file_is_no_key() -> None:
    assert load_transfer_keys(None) is None


def test_key_for_a_group_is_read(tmp_path: Path) -> None:
    keys = generate_keys()

    assert load_transfer_keys(str(write(tmp_path / "key", keys.secret_key, 0o440))) == keys


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (
            None,
            0o600,
            r"cannot read '{path}' \(No such file or directory\); make one with `pdserve keys generate FILE`",
        ),
        ("", 0o600, "'{path}' does not hold one key"),
        ("not a key\n", 0o600, "'{path}' does not hold one key"),
        ("a\nb\n", 0o600, "'{path}' does not hold one key"),
        ("é", 0o600, "'{path}' does not hold one key"),
        ("x" * 5000, 0o600, "'{path}' is too large for a key"),
        ("secret", 0o644, r"every user of this machine has access to '{path}' \(mode 0644\); run: chmod 600 {path}"),
        ("secret", 0o602, "every user of this machine has access to"),
    ],
)
def test_wrong_file_is_named_with_its_fix(tmp_path: Path, text: str | None, mode: int, message: str) -> None:
    path = tmp_path / "key"
    if text is not None:
        write(path, text, mode)

    with pytest.raises(SettingError, match="^--transfer-key-file: " + message.format(path=re.escape(str(path)))):
        load_transfer_keys(str(path))


def test_folder_is_not_a_key(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="is not a file"):
        load_transfer_keys(str(tmp_path))


def test_key_of_a_variable_is_that_of_a_file(tmp_path: Path) -> None:
    keys = generate_keys()

    assert load_transfer_keys(None, f"{keys.secret_key}\n") == keys
    with pytest.raises(SettingError, match="are both given"):
        load_transfer_keys(str(tmp_path / "key"), keys.secret_key)


def test_a_variable_without_a_key_is_named_and_its_text_is_not() -> None:
    with pytest.raises(SettingError, match="PDSERVE_TRANSFER_KEY") as error:
        load_transfer_keys(None, "not quite a key")

    assert "not quite" not in str(error.value) and error.value.__cause__ is None


def test_key_is_in_no_error(tmp_path: Path) -> None:
    secret = generate_keys().secret_key
    path = write(tmp_path / "key", secret + "x")

    with pytest.raises(SettingError) as error:
        load_transfer_keys(str(path))

    assert secret not in str(error.value) and error.value.__cause__ is None
