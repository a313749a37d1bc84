"""The command as a process: answers with the right exit code."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.cli.device_check import check_device
from pdserve.cli.errors import SettingError

pytestmark = pytest.mark.timeout(180)

COMMAND = [sys.executable, "-P", "-c", "from pdserve.cli.main import main; main()"]


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean | (environment or {}),
        check=False,
    )


def test_help_answers() -> None:
    result = run("--help")

    assert result.returncode == 0
    assert "pdserve serve" in result.stdout


@pytest.mark.parametrize("command", ["serve", "gateway", "prefill", "decode", "generate"])
def test_wrong_value_ends_with_code_2(command: str) -> None:
    result = run(command, "--log-level", "loud")

    assert result.returncode == 2
    assert result.stderr.strip() == (
        "pdserve: error: --log-level: 'loud' is wrong, it must be one of debug, info, warning, error"
    )


_CTRL_C_WHILE_LOADING = """
import os, signal, sys

class Presses:
    def find_spec(self, name, path, target=None):
        if name == "pdserve.cli.parser":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Presses())
from pdserve.cli.main import main
main(["--version"])
"""


@pytest.mark.usefixtures("sigint_is_heard")
def test_ctrl_c_before_anything_is_loaded_ends_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CTRL_C_WHILE_LOADING], capture_output=True, text=True, timeout=100, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("command", ["serve", "prefill", "decode", "generate"])
def test_a_gpu_that_cannot_be_there_is_named_before_anything_slow(command: str) -> None:
    try:
        check_device("cuda")
    except SettingError as error:
        said = str(error)
    else:
        pytest.skip("there may be a GPU")
    prompts = ["Hi"] if command == "generate" else []

    result = run(command, "--device", "cuda", *prompts, environment={"REDIS_URL": "redis://127.0.0.1:1"})

    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"pdserve: error: {said}\n" and said.startswith("--device: 'cuda' is not there: ")


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_missing_chat_template_is_named_before_anything_slow(command: str) -> None:
    result = run(command, "--port", "0", "--chat-template", "/no/such.jinja", "--redis-url", "redis://127.0.0.1:1")

    assert result.returncode == 2
    assert result.stderr == (
        "pdserve: error: --chat-template: cannot read '/no/such.jinja' (No such file or directory); give a Jinja file\n"
    )


def test_port_in_use_ends_and_names_the_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        result = run("serve", environment={"PDSERVE_PORT": str(port)})

    assert result.returncode == 2
    assert f"--port: {port} is in use on 127.0.0.1" in result.stderr


def test_foreign_host_is_named() -> None:
    result = run("serve", "--host", "192.0.2.1")

    assert result.returncode == 2
    assert "--host" in result.stderr


def test_missing_model_ends_with_code_1(tmp_path: Path) -> None:
    result = run("serve", "--port", "0", "--model", str(tmp_path))

    assert result.returncode == 1
    assert "missing config.json, tokenizer.json, model.safetensors" in result.stderr


@pytest.mark.parametrize("command", ["serve", "prefill", "decode"])
def test_wrong_transfer_key_file_ends_with_code_2(command: str, tmp_path: Path) -> None:
    path = tmp_path / "none"
    environment = {"PDSERVE_TRANSFER_KEY_FILE": str(path), "REDIS_URL": "redis://127.0.0.1:1"}

    result = run(command, environment=environment)

    assert result.returncode == 2
    assert f"--transfer-key-file: cannot read '{path}'" in result.stderr
    assert "make one with `pdserve keys generate FILE`" in result.stderr


def test_generated_key_is_left_alone_the_second_time(tmp_path: Path) -> None:
    path = tmp_path / "key"

    first, made = run("keys", "generate", str(path)), path.read_text()
    second = run("keys", "generate", str(path))

    assert (first.returncode, second.returncode) == (0, 0)
    assert "holds a new key" in first.stderr and "left as it is" in second.stderr
    assert path.read_text() == made
    assert made.strip() not in first.stderr + first.stdout


def test_closed_standard_streams_are_as_good_as_empty_ones() -> None:
    """Each is closed by the shell, as cron jobs and service managers do; then nothing else may get its number."""
    command = 'exec "$@" generate <&-'
    done = subprocess.run(
        ["bash", "-c", command, "-", *COMMAND], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pdserve: error: no prompt: give one as")

    command = 'exec "$@" generate <&- >&- 2>&-'
    done = subprocess.run(
        ["bash", "-c", command, "-", *COMMAND], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


_CLOSED = """
import os, sys
from pdserve.cli.main import main
try:
    main(["--version"])
except SystemExit as ended:
    opened = os.open(os.devnull, os.O_RDONLY)
    sys.exit(100 + opened if ended.code == 0 else ended.code)
"""


def test_a_number_of_a_closed_standard_stream_is_given_to_nothing_else() -> None:
    command = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", sys.executable, "-P", "-c", _CLOSED]

    assert subprocess.run(command, timeout=100, check=False).returncode == 103


def test_what_the_terminal_cannot_show_is_written_otherwise() -> None:
    code = "from pdserve.cli.main import main\ntry: main(['--version'])\nexcept SystemExit: print('caf\u00e9 \u4e16')"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONIOENCODING": "latin-1"}, capture_output=True, timeout=100, check=True
    )

    assert done.stdout.splitlines()[-1] == b"caf\xe9 \\u4e16"
