"""`pdserve generate` from file to file: each line answered once, whatever ends the run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.errors import SettingError
from pdserve.cli.generate import generate
from pdserve.cli.prompt_file import AnswerFile, PromptLine
from pdserve.cli.settings import Settings

_COMMAND = [sys.executable, "-P", "-c", "from pdserve.cli.main import main; main()"]


def _settings(model_dir: Path, folder: Path, **options: Any) -> Settings:
    files = {"input": str(folder / "prompts.jsonl"), "output": str(folder / "out.jsonl")}
    return Settings(
        **{"model": str(model_dir), "num_blocks": 64, "max_tokens": 5, "ignore_eos": True, **files, **options}
    )


def _write(folder: Path, *lines: Any) -> None:
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _answers(folder: Path) -> dict[int, dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "out.jsonl").read_bytes().splitlines()]
    assert len({entry["line"] for entry in entries}) == len(entries), "a line is answered twice"
    return {entry["line"]: entry for entry in entries}


def test_each_kind_of_line_gets_its_answer(tiny_model: Any, tmp_path: Path) -> None:
    lines = [
        "w5 w9 w23",
        {"prompt": "w5 w9 w23", "id": "same"},
        {"prompt_token_ids": [5, 9, 23], "custom_id": 7, "max_tokens": 3, "logprobs": 1},
        {"prompt": "w5", "n": 2, "temperature": 1.0, "seed": 1},
        {"prompt": "w5", "temperature": 9},
        {"prompt": "w5", "tempreature": 1},
        {"messages": "w5"},
        {"prompt_token_ids": [5, 999]},
        17,
    ]
    _write(tmp_path, *lines)

    assert generate(_settings(tiny_model(), tmp_path), [], progress=lambda line: None) == 0

    answers = _answers(tmp_path)
    assert sorted(answers) == list(range(1, 10))
    first, same, by_ids = answers[1]["outputs"], answers[2]["outputs"], answers[3]["outputs"]
    assert first == same and answers[2]["id"] == "same" and answers[3]["custom_id"] == 7
    assert first[0]["text"].startswith(by_ids[0]["text"])
    assert len(by_ids[0]["logprobs"]) == 3
    assert answers[1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 0}
    assert len(answers[4]["outputs"]) == 2
    fields = [answers[line]["error"]["field"] for line in range(5, 10)]
    assert fields == ["temperature", "tempreature", "messages", "prompt", "line"]


def test_a_line_that_no_program_should_write_ends_no_run(tiny_model: Any, tmp_path: Path) -> None:
    """Each is answered with its mistake, and the lines around it as if it were not there."""
    (tmp_path / "prompts.jsonl").write_text(
        "\n".join(
            (
                '{"prompt": "w5", "id": NaN}',
                '{"prompt": "\\ud800 w5"}',
                "[" * 100_000,
                '{"prompt": "w5", "temperature": 1e400}',
                '{"prompt": "w5", "logit_bias": [[1]]}',
                '{"prompt": "w5", "logit_bias": {"x": 1}}',
                '{"prompt": "w5", "structured_outputs": {"regex": 5}}',
                '{"prompt": "w5", "structured_outputs": {"xml": "a"}}',
                '"w5"',
            )
        )
    )

    assert generate(_settings(tiny_model(), tmp_path), [], progress=lambda line: None) == 0

    answers = _answers(tmp_path)
    assert len(answers) == 9 and "outputs" in answers[9]
    fields = [answers[line]["error"]["field"] for line in range(1, 9)]
    assert fields == ["line", "line", "line", "line", "sampling", "sampling", "regex", "sampling"]


def test_a_line_may_ask_for_all_that_sampling_knows(tiny_model: Any, tmp_path: Path) -> None:
    _write(
        tmp_path,
        {"prompt": "w5 w9 w23", "prompt_logprobs": 1, "max_tokens": 2, "logprobs": 0},
        {"prompt": "w5 w9", "logit_bias": {"7": 100, "8": -100}, "max_tokens": 2},
    )

    assert generate(_settings(tiny_model(), tmp_path), [], progress=lambda line: None) == 0

    scored, biased = (_answers(tmp_path)[line] for line in (1, 2))
    first, *others = scored["prompt_logprobs"]
    assert first is None and len(others) == 2
    assert all(score["logprob"] < 0 and len(score["top_logprobs"]) == 1 for score in others)
    assert [token["top_logprobs"] for token in scored["outputs"][0]["logprobs"]] == [[], []]
    assert biased["outputs"][0]["text"].split() == ["w7", "w7"]


def test_penalties_come_from_the_command_line(tiny_model: Any, tmp_path: Path) -> None:
    _write(tmp_path, "w5 w9 w23", {"prompt": "w5 w9 w23", "repetition_penalty": 1.0})

    settings = _settings(tiny_model(), tmp_path, max_tokens=40, repetition_penalty=8.0)
    generate(settings, [], progress=lambda line: None)

    penalized, plain = (answer["outputs"][0]["text"].split() for _, answer in sorted(_answers(tmp_path).items()))
    assert len(set(penalized)) > len(set(plain))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_run_goes_on_without_losing_or_repeating_a_line(tiny_model: Any, tmp_path: Path) -> None:
    """Killed with SIGKILL twice, as soon as some more lines are there, and then with a torn line at the end."""
    _write(tmp_path, *({"prompt": f"w{index} w9 w23", "id": index} for index in range(3, 153)))
    output = tmp_path / "out.jsonl"
    options = {"--max-num-seqs": "2", "--max-tokens": "60", "--num-blocks": "64", "--num-threads": "1"}
    files = ["--input", str(tmp_path / "prompts.jsonl"), "--output", str(output), "--ignore-eos"]
    flags = [part for option in options.items() for part in option]
    command = [*_COMMAND, "generate", "--model", str(tiny_model()), *files, *flags]

    sizes = [_run_and_kill(command, output, num_more=5) for _ in range(2)]
    with output.open("ab") as file:
        file.write(b'{"line": 9')
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240, env=_environment(), check=False)

    assert finished.returncode == 0, finished.stderr
    assert 5 <= sizes[0] < sizes[1] < 150, "both were killed half-way"
    answers = _answers(tmp_path)
    assert sorted(answers) == list(range(1, 151))
    assert all(answer["id"] == line + 2 for line, answer in answers.items())
    straight = tmp_path / "straight"
    straight.mkdir()
    (straight / "prompts.jsonl").write_text((tmp_path / "prompts.jsonl").read_text())
    generate(_settings(tiny_model(), straight, max_tokens=60), [], progress=lambda line: None)
    expected = {line: answer["outputs"] for line, answer in _answers(straight).items()}
    assert {line: answer["outputs"] for line, answer in answers.items()} == expected


def _run_and_kill(command: list[str], output: Path, num_more: int) -> int:
    before = _num_lines(output)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment()) as process:
        deadline = time.monotonic() + 120
        while _num_lines(output) < before + num_more:
            assert process.poll() is None and time.monotonic() < deadline, "nothing is written"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    return _num_lines(output)


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}


def test_answers_to_another_input_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with AnswerFile.open(path) as answers:
        answers.add(PromptLine(1, '"w5"'), {"outputs": []})
        with pytest.raises(SettingError, match="another process"), AnswerFile.open(path):
            pass

    with AnswerFile.open(path) as answers:
        assert answers.has(PromptLine(1, '"w5"')) and not answers.has(PromptLine(2, '"w5"'))
        with pytest.raises(SettingError, match="another --input"):
            answers.has(PromptLine(1, '"w6"'))
    path.write_text("hello\n")
    with pytest.raises(SettingError, match="something else"), AnswerFile.open(path):
        pass


@pytest.mark.parametrize("options", [{"output": None}, {"input": None}, {"input": "/no/such/file"}])
def test_files_that_do_not_fit_are_named(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--input"):
        generate(_settings(tmp_path, tmp_path, **options), [], progress=lambda line: None)
