"""benchmarks/transfer.py moves blocks by every way that it is told to, and says what it measured."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

_PROGRAM = Path(__file__).parents[2] / "benchmarks" / "transfer.py"


@pytest.mark.timeout(300)
def test_every_way_arrives_and_is_compared_with_bare_sockets(tmp_path: Path) -> None:
    chosen = ("checked tcp", "ours default", "ours tcp CURVE", "ours shm, decoding")
    size = ("--mib", "4", "--block-kib", "64", "--runs", "4", "--rounds", "1", "--curve", "--decoding")
    files = ("--json", str(tmp_path / "rows.json"), "--svg", str(tmp_path / "rows.svg"))

    subprocess.run([sys.executable, str(_PROGRAM), *size, *files, "--ways", *chosen], check=True, timeout=280)

    rows = {row["way"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert set(rows) == {"bare tcp", "bare ipc", "bare tcp CURVE", *chosen, "memcpy"}
    assert all(row["gb_per_s"] >= 0 for row in rows.values())
    assert rows["bare tcp"]["of_bare"] == rows["bare ipc"]["of_bare"] == 1
    assert (tmp_path / "rows.svg").read_text().count("<rect") == len(rows)


def test_every_way_is_compared_with_one_that_there_is(load: Callable[[str], ModuleType]) -> None:
    ways = load("transfer_ways")
    every = (*ways.WAYS, *ways.curve_ways(), *ways.DECODING_WAYS)

    names = [way.name for way in every]

    assert len(set(names)) == len(names)
    assert {way.reference for way in every} <= {way.name for way in every if way.is_bare and not way.is_checked}
