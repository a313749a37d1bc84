"""`pdserve estimate`: numbers of the report, and what it says to wrong options."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.cli.commands import run
from pdserve.cli.errors import SettingError
from pdserve.engine.errors import ModelError

_CONFIG = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "torch_dtype": "float16"}


def _estimate(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    assert run(["estimate", *arguments], {}) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_report_of_a_40_gib_card(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--context", "2048,32768", "--concurrency", "1,10", "--memory", "40GiB"]
    lines = _estimate(capsys, json.dumps(_CONFIG), *options, "--weights", "14GiB", "--buffers", "4GiB")

    assert "524,288" in lines[0]
    assert ["2,048", "1,073,741,824", "1.00", "GiB", "10.00", "GiB"] in lines
    assert ["32,768", "17,179,869,184", "16.00", "GiB", "160.00", "GiB"] in lines
    assert ["2,048", "22", "88", "512"] in lines


def test_beside_8_bit_weights_are_keys_and_values_of_16(capsys: pytest.CaptureFixture[str]) -> None:
    int8, given = (
        _estimate(capsys, json.dumps(_CONFIG), "--dtype", "int8", *options)
        for options in ((), ("--kv-cache-dtype", "float32"))
    )

    assert "bfloat16:" in int8[0] and "524,288" in int8[0]
    assert "float32:" in given[0] and "1,048,576" in given[0]


def test_a_file_a_directory_and_json_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))

    reports = [_estimate(capsys, spec) for spec in (json.dumps(_CONFIG), str(tmp_path), str(tmp_path / "config.json"))]

    assert reports[0] == reports[1] == reports[2]


def test_memory_that_does_not_hold_the_weights_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _estimate(capsys, json.dumps(_CONFIG), "--memory", "10GiB", "--weights", "14GiB")

    assert lines[-1][:4] == ["leaves", "nothing", "for", "KV:"]
    assert "4.00" in lines[-1]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--context", "2048,many"), ("--memory", "lots"), ("--kv-cache-dtype", "int3"), ("--average", "0")],
)
def test_a_wrong_option_is_named(option: str, value: str) -> None:
    with pytest.raises(SettingError, match=option):
        run(["estimate", json.dumps(_CONFIG), "--memory", "1GiB", "--weights", "0", option, value], {})


def test_what_is_no_config_is_named(tmp_path: Path) -> None:
    for spec in (str(tmp_path), "no-such-thing", "{"):
        with pytest.raises(ModelError):
            run(["estimate", spec], {})


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys; from pdserve.cli.commands import run\n"
        f"run(['estimate', {json.dumps(json.dumps(_CONFIG))}, '--memory', '40GiB', '--weights', '1GiB'], {{}})\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, timeout=60)
