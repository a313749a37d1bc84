"""From settings to the configuration of each process, and the small commands around them."""

import asyncio
import contextlib
import errno
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.cli.child_process import ChildProcess, ChildSpec
from pdserve.cli.embedded_redis import embedded_redis
from pdserve.cli.errors import SettingError
from pdserve.cli.node_health import ask_nodes
from pdserve.cli.processes import advertised_host, engine_config, node_config
from pdserve.cli.serve import _arguments, _with_own_ports, curl_example
from pdserve.cli.setting_sources import resolve_settings
from pdserve.cli.setting_spec import Command
from pdserve.cli.settings import Settings
from pdserve.kvtransfer import generate_keys

SETTINGS = Settings(redis_url="redis://127.0.0.1:6379/0")


def test_node_without_redis_is_told_what_to_give() -> None:
    with pytest.raises(SettingError, match=r"--redis-url \(env REDIS_URL\): not given"):
        node_config(Settings(), Command.DECODE)


def test_node_ids_are_unique_unless_given() -> None:
    ids = {node_config(SETTINGS, Command.DECODE).node_id for _ in range(2)}

    assert len(ids) == 2
    assert node_config(replace(SETTINGS, node_id="mine"), Command.DECODE).node_id == "mine"


def test_bound_host_is_what_others_are_told() -> None:
    assert node_config(SETTINGS, Command.PREFILL).advertise_host is None


def test_wildcard_is_advertised_as_the_address_towards_redis() -> None:
    assert advertised_host("0.0.0.0", "redis://127.0.0.1:6379/0") == "127.0.0.1"
    assert node_config(replace(SETTINGS, host="0.0.0.0"), Command.PREFILL).advertise_host == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "advertise_host", "is_warned"),
    [
        ("0.0.0.0", None, True),
        ("::", "::1", True),
        ("0.0.0.0", "node7", False),
        ("0.0.0.0", "10.0.0.7", False),
        ("127.0.0.1", None, False),
    ],
)
def test_wildcard_that_leads_nobody_here_is_warned_of(
    caplog: pytest.LogCaptureFixture, host: str, advertise_host: str | None, is_warned: bool
) -> None:
    node_config(replace(SETTINGS, host=host, advertise_host=advertise_host), Command.DECODE)

    assert [record.levelname for record in caplog.records] == ["WARNING"] * is_warned


def test_given_address_wins_over_the_found_one() -> None:
    settings = replace(SETTINGS, host="0.0.0.0", advertise_host="node7")

    assert node_config(settings, Command.PREFILL).advertise_host == "node7"


def test_wildcard_without_a_way_to_redis_names_the_option() -> None:
    with pytest.raises(SettingError, match="--advertise-host: needed with --host"):
        advertised_host("0.0.0.0", "redis://no-such-host.invalid:6379")


def test_kv_events_are_off_stay_on_this_machine_and_beyond_it_need_keys() -> None:
    assert node_config(SETTINGS, Command.DECODE).kv_events is None
    wanted = replace(SETTINGS, kv_events_port=5600, node_id="d1", served_model_name="tiny")

    events = node_config(wanted, Command.DECODE).kv_events

    assert events is not None
    assert (events.endpoint, events.replay_endpoint) == ("tcp://127.0.0.1:5600", "tcp://127.0.0.1:5601")
    assert (events.topic, events.format) == ("kv@d1@tiny", "array")
    newer = node_config(replace(wanted, kv_events_format="map"), Command.DECODE).kv_events
    assert newer is not None and newer.format == "map"
    with pytest.raises(SettingError, match="--transfer-key-file"):
        node_config(replace(wanted, kv_events_host="0.0.0.0"), Command.DECODE)
    assert node_config(replace(wanted, kv_events_host="0.0.0.0"), Command.DECODE, generate_keys()).kv_events


def test_nodes_of_one_machine_publish_on_ports_of_their_own() -> None:
    settings = replace(SETTINGS, kv_events_port=5600)

    assert [_with_own_ports(settings, index).kv_events_port for index in range(3)] == [5600, 5602, 5604]
    assert _with_own_ports(replace(settings, kv_events_port=0), 2).kv_events_port == 0
    assert _with_own_ports(SETTINGS, 2).kv_events_port is None


def test_pasted_curl_asks_for_the_model_whatever_its_name_is() -> None:
    name = 'it\'s "a" $model'

    words = shlex.split(curl_example("http://[::1]:8000", name, needs_key=False))

    assert json.loads(words[words.index("-d") + 1])["model"] == name


def test_engine_settings_arrive(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    settings = Settings(model=str(tmp_path), dtype="bfloat16", kv_memory=2**20, num_threads=3, prefix_cache=False)

    config = engine_config(settings, progress=lambda line: None)

    assert (config.model_dir, config.dtype, config.kv_memory_bytes) == (tmp_path, "bfloat16", 2**20)
    assert (config.num_threads, config.enable_prefix_cache) == (3, False)
    gpu = replace(settings, device="cuda:1", kv_cache_dtype="fp8", gpu_memory_utilization=0.4, kv_memory=None)
    config = engine_config(replace(gpu, batch_invariant=True, enforce_eager=True), progress=lambda line: None)
    assert (config.device, config.resolved_kv_dtype, config.gpu_memory_utilization) == ("cuda:1", "fp8", 0.4)
    assert config.batch_invariant and config.enforce_eager and config.kv_memory_bytes is None


@pytest.mark.parametrize("command", [Command.GATEWAY, Command.PREFILL, Command.DECODE])
def test_child_resolves_to_what_its_parent_meant(command: Command) -> None:
    meant = Settings(
        model="/models/with space",
        redis_url="unix://:secret@/tmp/redis.sock",
        namespace="pdserve-1",
        log_level="debug",
        prefix_cache=False,
        port=1,
        api_keys=("one", "two"),
        drain_s=0.5,
        transfer_key_file="/keys/transfer.key",
        transfer_key="a secret key",
        kv_memory=2**30,
    )

    flags, environment = _arguments(command, meant)
    texts = {
        flag.removeprefix("--").split("=")[0].replace("-", "_"): flag.partition("=")[2] for flag in flags if "=" in flag
    }
    resolved = resolve_settings(command, texts, environment, None)

    assert "--transfer-key-file=/keys/transfer.key" in flags
    assert "secret" not in " ".join(flags)
    assert "one" not in " ".join(flags)
    for name in texts.keys() | {"redis_url", "transfer_key"}:
        assert getattr(resolved, name) == getattr(meant, name)
    assert ("--no-prefix-cache" in flags) == (command is not Command.GATEWAY)


async def test_health_without_any_node_is_bad() -> None:
    lines: list[str] = []
    with embedded_redis() as redis:
        server = ChildProcess(ChildSpec("redis", redis.command, dict(os.environ)), lambda *_: None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.run(), name="redis")
            for _ in range(5_000):
                if await redis.is_answering():
                    break
                await asyncio.sleep(0.01)  # the server announces itself by answering only
            settings = Settings(redis_url=redis.url, namespace="empty")

            exit_code = await asyncio.to_thread(ask_nodes, settings, lines.append)

            await server.stop(50.0)

    assert exit_code == 1
    assert lines == ["no node is registered with address 127.0.0.1 in namespace 'empty'"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_generate_answers_from_standard_input(demo_model_dir: Path) -> None:
    command = [sys.executable, "-P", "-c", "from pdserve.cli.main import main; main()", "generate"]
    question = "What is the capital of France?\n"

    result = subprocess.run(
        [*command, "--model", str(demo_model_dir), "--max-tokens", "16", "--kv-memory", "64MiB"],
        input=question,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", ["prefill", "decode"])
def test_a_node_that_is_still_loading_ends_when_told_to(
    command: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model(), model)
    (model / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(model / "generation_config.json")
    with subprocess.Popen(
        [sys.executable, "-P", "-c", "from pdserve.cli.main import main; main()", command, "--model", str(model)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"REDIS_URL": "redis://127.0.0.1:1"},
    ) as node:
        try:
            with _writer_of(model / "generation_config.json", node):  # it has been opened, and is never read to its end
                node.send_signal(signal.SIGTERM)

                assert node.wait(timeout=60) == -signal.SIGTERM
        finally:
            node.kill()
        assert node.stderr is not None and "Traceback" not in node.stderr.read()


@contextlib.contextmanager
def _writer_of(fifo: Path, reader: subprocess.Popen[str]) -> Iterator[None]:
    """Hold the writing end of `fifo`, opened as soon as `reader` has opened the other."""
    deadline = time.monotonic() + 120
    while True:
        try:
            descriptor = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError as error:
            assert error.errno == errno.ENXIO and reader.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)  # a pipe announces its reader by opening only
    try:
        yield
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("command", ["gateway", "serve"])
def test_a_taken_port_is_named_in_one_line_before_anything_slow(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = [command, "--port", str(port), "--redis-url", "redis://127.0.0.1:1"]

        done = subprocess.run(
            [sys.executable, "-P", "-c", "from pdserve.cli.main import main; main()", *arguments],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    assert done.returncode == 2
    assert done.stderr.startswith(f"pdserve: error: --port: {port} is in use on 127.0.0.1")
    assert done.stderr.count("\n") == 1
