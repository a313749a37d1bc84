"""Files that nodes would fail to write are named before anything slow."""

from pathlib import Path

import pytest

from pdserve.cli.errors import SettingError
from pdserve.cli.file_check import check_files
from pdserve.cli.settings import Settings


def test_paths_that_can_be_written_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "there").touch()

    check_files(
        Settings(
            transfer_spans_file=str(tmp_path / "there"),
            core_share_file=str(tmp_path / "new"),
            kv_disk_dir=str(tmp_path / "not" / "yet"),
        )
    )

    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    settings = Settings(transfer_spans_file=str(tmp_path / "none" / "spans.jsonl"))

    with pytest.raises(SettingError, match=r"--transfer-spans-file: there is no directory '.*/none' for "):
        check_files(settings)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"--core-share-file: .* is a directory; give the path of a file"):
        check_files(Settings(core_share_file=str(tmp_path)))


@pytest.mark.parametrize("name", ["transfer_spans_file", "core_share_file", "kv_disk_dir"])
def test_a_path_that_cannot_even_be_looked_at_is_named(name: str, tmp_path: Path) -> None:
    flag = "--" + name.replace("_", "-")

    with pytest.raises(SettingError, match=rf"{flag}: .* cannot be used \(File name too long\); give another path"):
        check_files(Settings(**{name: str(tmp_path / ("x" * 300))}))


def test_blocks_cannot_be_kept_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SettingError, match=r"--kv-disk-dir: '.*/file' is not a directory"):
        check_files(Settings(kv_disk_dir=str(tmp_path / "file" / "kv")))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_folder_that_takes_no_files_is_named_whoever_asks() -> None:
    for settings in (Settings(kv_disk_dir="/proc/blocks"), Settings(core_share_file="/proc/cores")):
        with pytest.raises(SettingError, match="/proc"):
            check_files(settings)
