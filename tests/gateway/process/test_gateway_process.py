"""The gateway as a process of its own: without Redis, without nodes, and until it is told to stop."""

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, logging, pathlib, sys
from pdserve.gateway.config import GatewayConfig, HttpConfig
from pdserve.gateway.errors import CannotListen
from pdserve.gateway.process import run_gateway
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
config = GatewayConfig(
    model_dir=pathlib.Path(sys.argv[1]),
    redis_url="unix:///nonexistent/redis.sock",
    http=HttpConfig(model_names=("demo",), port=int(sys.argv[2])),
)
try:
    sys.exit(asyncio.run(run_gateway(config)))
except CannotListen as error:
    print(error)
    sys.exit(3)
"""


class GatewayProcess:
    """A gateway that has said where it listens."""

    def __init__(self, model_dir: Path) -> None:
        command = [sys.executable, "-u", "-c", PROGRAM, str(model_dir), "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("listening on "):
                self.url = line.removeprefix("listening on ").strip()
                return
        raise AssertionError("".join(lines))

    def request(self, path: str, body: object = None) -> tuple[int, dict]:
        data = None if body is None else json.dumps(body).encode()
        try:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self.url + path, data=data, headers=headers)
            with urllib.request.urlopen(request, timeout=50) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


@pytest.fixture
def gateway(demo_model_dir: Path) -> Iterator[GatewayProcess]:
    running = GatewayProcess(demo_model_dir)
    yield running
    running.process.kill()
    running.process.communicate(timeout=50)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_lives_without_redis_says_why_it_is_not_ready_and_stops_when_told(gateway, number):
    assert gateway.request("/health")[0] == 200
    status, reply = gateway.request("/ready")
    assert status == 503 and reply["error"]["message"] == "Redis does not answer"
    status, reply = gateway.request("/v1/completions", {"model": "demo", "prompt": "x"})
    assert status == 503 and reply["error"]["code"] == "no_nodes"
    status, reply = gateway.request("/v1/completions", {"model": "demo", "prompt": []})
    assert status == 400
    status, reply = gateway.request("/admin/status")
    assert status == 200
    assert reply["redis"]["ok"] is False and reply["nodes"] == []
    assert set(reply["requests"]) == {
        "queued", "prefilling", "transferring", "decoding", "finished", "failed", "cancelled"
    }  # fmt: skip
    assert set(reply["routes"]) == {"disaggregated", "local", "migrated"}

    gateway.process.send_signal(number)

    assert gateway.process.wait(timeout=50) == 0


def test_an_address_that_is_taken_is_named(demo_model_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-c", PROGRAM, str(demo_model_dir), str(port)]

        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    assert done.returncode == 3, done.stderr
    assert f"cannot listen on 127.0.0.1:{port}" in done.stdout
