"""What a stranger types: help, and what is wrong told at once instead of after the measuring."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Load = Callable[[str], ModuleType]

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "script", ["run.py", "render.py", "shared_cores.py", "fuzz_frames.py", "peers/environments.py"]
)
def test_help_says_what_a_script_does(script: str) -> None:
    command = [sys.executable, str(_BENCHMARKS / script), "--help"]

    shown = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout

    first_line = (_BENCHMARKS / script).read_text().splitlines()[0].removeprefix('"""')
    assert first_line in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["W1", "--rounds", "0"], "--rounds: 0 is not above 0"),
        (["W4", "--rate", "-1"], "--rate: -1 is not above 0"),
        (["W6", "--slo-ttft-ms", "nan"], "--slo-ttft-ms: nan is not above 0"),
        (["all", "--budget-minutes", "inf"], "--budget-minutes: inf is not above 0"),
        (["all", "--peer", "nonsense"], "'nonsense' is no system"),
        (["W1", "--ours", "nonsense"], "'nonsense' is no system"),
        (["W1", "--peer", "llamacpp-q8_0"], "llamacpp is not installed"),
        (["W1", "--tune", "vllm"], "vllm is not installed"),
        (["W1", "--tune", "pdserve"], "cannot be tuned"),
        (["all", "--trace", "no-such-file.csv"], "no-such-file.csv"),
        (["W1", "--resume"], "--resume needs the --output"),
        (["W1", "--output", __file__], "is not a directory"),
    ],
)
def test_what_would_fail_later_is_refused_first(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], named: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("PDSERVE_PEERS_DIR", str(tmp_path))

    with pytest.raises(SystemExit) as ended:
        load("run").checked_options(arguments)

    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_a_trace_is_refused_for_any_of_its_rows(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,100,10\nlater,100,10\n")

    with pytest.raises(SystemExit):
        load("run").checked_options(["W6", "--ours", "pdserve", "--peer", "pdserve", "--trace", str(trace)])

    assert "row 2" in capsys.readouterr().err


def test_a_damaged_file_is_no_comparison_to_resume(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "W1.json").write_text("{}")

    with pytest.raises(SystemExit):
        load("run").checked_options(["W1", "--output", str(tmp_path), "--resume"])

    assert "W1.json is no result of run.py" in capsys.readouterr().err


def test_a_folder_without_results_is_not_rendered(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["render.py", str(tmp_path)])

    with pytest.raises(SystemExit):
        load("render").main()

    assert "has no results" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_outputs_are_refused_before_anything_runs(load: Load, tmp_path: Path) -> None:
    outputs = load("outputs")

    assert outputs.output_file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    assert outputs.output_folder(str(tmp_path / "new" / "folder")) == tmp_path / "new" / "folder"
    for refuse, path in ((outputs.output_file, tmp_path), (outputs.output_file, tmp_path / "none" / "x.json")):
        with pytest.raises(outputs.argparse.ArgumentTypeError, match="directory"):
            refuse(str(path))
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(300)  # modules of torch are read, on a busy machine
@pytest.mark.parametrize(
    ("script", "arguments", "named"),
    [
        ("limits", ["--rounds", "0"], "--rounds: 0 is not above 0"),
        ("limits", ["--prompt-tokens", "7"], "--prompt-tokens: at least 8"),
        ("growth", ["--steps", "-3"], "--steps: -3 is not above 0"),
        ("split", ["--prompt", "64", "--prompt", "0"], "--prompt: 0 is not above 0"),
        ("shared_cores", ["pdserve", "--seconds", "inf"], "--seconds: inf is not above 0"),
        ("perplexity", ["--max-tokens", "1"], "at least 2"),
        ("cpu_kernels", ["--threads", "many"], "--threads: invalid int value: 'many'"),
    ],
)
def test_an_amount_that_cannot_be_measured_is_refused_first(
    load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    script: str, arguments: list[str], named: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])

    with pytest.raises(SystemExit) as ended:
        load(script).main()

    assert ended.value.code == 2
    assert named in capsys.readouterr().err
