"""The cores of a container are those that it may run on and has the time of; groups as Linux describes them."""

import os
from pathlib import Path

import pytest

from pdserve.engine import available_cores
from pdserve.engine.available_cores import cpu_share, num_available_cores


def _write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "200000 100000\n"}, 0.5),
        ("0::/../outside\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("4:memory:/m\n3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("3:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "400000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 4.0),
        (
            "3:cpu,cpuacct:/docker/of-the-host\n0::/docker/of-the-host\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
        ("3:cpuset:/x\n", {"cpu/x/cpu.cfs_quota_us": "400000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, None),
        ("0::/\n", {"cpu.max": "what\n"}, None),
        ("0::/\n", {}, None),
        ("nonsense\n\n", {}, None),
    ],
)
def test_the_strictest_group_around_counts(
    tmp_path: Path, membership: str, files: dict[str, str], expected: float | None
) -> None:
    (tmp_path / "membership").write_text(membership)
    _write(tmp_path / "groups", files)

    assert cpu_share(tmp_path / "membership", tmp_path / "groups") == expected


def test_a_system_without_groups_limits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available_cores, "_MEMBERSHIP", tmp_path / "nowhere")

    assert num_available_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("quota", "expected"), [(1, 1), (100_000, 1), (10**9, len(os.sched_getaffinity(0)))])
def test_a_part_of_a_core_is_one_and_no_more_than_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: int, expected: int
) -> None:
    _write(tmp_path, {"membership": "0::/\n", "cpu.max": f"{quota} 100000\n"})
    monkeypatch.setattr(available_cores, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(available_cores, "_CGROUPS", tmp_path)

    assert num_available_cores() == expected
