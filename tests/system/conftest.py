"""Whole installations of real processes: Redis, a gateway and nodes, each of which a test may kill."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.embedded_redis import EmbeddedRedis, embedded_redis

_START_TIMEOUT_S = 200.0
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.05


@dataclass
class Cluster:
    """One installation. Processes have names (`gateway`, `prefill-0`, `decode-0`, `redis`); their logs are files."""

    folder: Path
    model_dir: Path
    redis: EmbeddedRedis
    node_options: tuple[str, ...]
    gateway_options: tuple[str, ...] = ()
    common_options: tuple[str, ...] = ()  # of the gateway and of every node
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = 0

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return f"http://127.0.0.1:{self.port}"

    def start_redis(self) -> None:
        """Start Redis, empty, where everybody looks for it."""
        self._spawn("redis", list(self.redis.command))

    def start_gateway(self) -> None:
        """Start the gateway on a free port and learn which."""
        options = ["--port", str(self.port), *self.gateway_options]
        self._spawn("gateway", [_console_script(), "gateway", *self._common(), *options])
        if self.port == 0:
            self.port = self._wait_for_port("gateway")

    def start_gateway_beside(self, name: str, *options: str) -> str:
        """Start one more gateway of the same nodes, `gateway-name`; return its URL once it is ready."""
        process = f"gateway-{name}"
        self._spawn(process, [_console_script(), "gateway", *self._common(), "--port", "0", *options])
        url = f"http://127.0.0.1:{self._wait_for_port(process)}"
        self.wait_until(lambda: get_json(f"{url}/ready")[0] == 200, f"{process} is ready")
        return url

    def start_node(self, role: str, index: int = 0, *options: str) -> None:
        """Start a prefill or a decode node, known as `role-index` to everybody."""
        name = f"{role}-{index}"
        command = [_console_script(), role, "--node-id", name, *self._common(), *self.node_options, *options]
        self._spawn(name, command)

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a process, wait for its end and return its exit code."""
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(_STOP_TIMEOUT_S)

    def stop(self) -> None:
        """End what still runs, the gateway first."""
        for name in sorted(self.processes, key=lambda name: not name.startswith("gateway")):
            process = self.processes[name]
            process.send_signal(signal.SIGTERM if name != "redis" else signal.SIGKILL)
        for name, process in self.processes.items():
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise AssertionError(f"{name} did not stop: {self.log(name)}") from None

    def log(self, name: str) -> str:
        """Return the end of what a process has written."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def get(self, path: str) -> tuple[int, Any]:
        """GET a JSON resource; return status and body."""
        return get_json(self.url + path)

    def status(self) -> dict[str, Any]:
        """Return /admin/status."""
        code, body = self.get("/admin/status")
        assert code == 200, body
        status: dict[str, Any] = body
        return status

    def wait_ready(self) -> None:
        """Wait until the gateway says that a token can be produced."""
        self.wait_until(lambda: self.get("/ready")[0] == 200, "ready")

    def wait_for_nodes(self, count: int) -> None:
        """Wait until so many nodes are known and each would be given work: a node is known before it is connected."""

        def are_ready() -> bool:
            nodes = self.status()["nodes"]
            return len(nodes) == count and all(node["ready"] for node in nodes)

        self.wait_until(are_ready, f"{count} nodes are ready")

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Ask again and again until `condition` holds; fail with everybody's logs after the deadline."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return
            except (OSError, json.JSONDecodeError):
                pass  # not listening yet
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {name}\n{self.log(name)}" for name in self.processes)
                raise AssertionError(f"not within {timeout_s:g} s: {what}\n{logs}")
            time.sleep(_POLL_S)

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until no node holds anything for a request (what its prefix tree remembers aside)."""
        self.wait_until(lambda: not self._held(), "nothing held", timeout_s)

    def _held(self) -> list[str]:
        held = []
        for node in self.status()["nodes"]:
            counts = {
                "running": node["running"],
                "waiting": node["waiting"],
                "in_use": node["blocks"]["in_use"],
                "in_flight": node["blocks"]["in_flight"],
                "open": node["transfer"]["open"],
            }
            held += [f"{node['node_id']}.{name}" for name, count in counts.items() if count]
        return held

    def _common(self) -> list[str]:
        own = ["--model", str(self.model_dir), "--redis-url", self.redis.url, "--served-model-name", "test"]
        return [*own, *self.common_options]

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder, env=_environment()
            )

    def _wait_for_port(self, gateway: str) -> int:
        process = self.processes[gateway]
        self.wait_until(
            lambda: process.poll() is not None or self._port_of(gateway) is not None, f"{gateway} says where it listens"
        )
        port = self._port_of(gateway)
        assert port is not None, f"{gateway} has ended: {self.log(gateway)}"
        return port

    def _port_of(self, gateway: str) -> int | None:
        marker = "listening on http://127.0.0.1:"
        _, found, rest = self.log(gateway).partition(marker)
        return int(rest.split()[0]) if found else None


def get_json(url: str) -> tuple[int, Any]:
    """GET a JSON resource; return status and body."""
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


StartCluster = Callable[..., Cluster]


@contextmanager
def _running_cluster(
    folder: Path,
    model_dir: Path,
    prefill: int,
    decode: int,
    node_options: tuple[str, ...],
    common_options: tuple[str, ...] = (),
) -> Iterator[Cluster]:
    with embedded_redis() as redis:
        cluster = Cluster(folder, model_dir, redis, node_options, common_options=common_options)
        try:
            cluster.start_redis()
            cluster.start_gateway()
            for role, count in (("prefill", prefill), ("decode", decode)):
                for index in range(count):
                    cluster.start_node(role, index)
            if prefill + decode == 0:
                yield cluster  # whoever starts nodes waits for them
                return
            cluster.wait_ready()
            cluster.wait_for_nodes(prefill + decode)
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture(scope="session")
def disaggregated(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode node with the demo model; shared: leave it as you found it."""
    folder = tmp_path_factory.mktemp("disaggregated")
    with _running_cluster(folder, demo_model_dir, 1, 1, ("--num-blocks", "400")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def colocated(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A single decode node that computes its prompts itself; shared: leave it as you found it."""
    folder = tmp_path_factory.mktemp("colocated")
    with _running_cluster(folder, demo_model_dir, 0, 1, ("--num-blocks", "400")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def running_cluster() -> Callable[..., AbstractContextManager[Cluster]]:
    """Return what runs an installation for a fixture of a wider scope."""
    return _running_cluster


@pytest.fixture
def start_cluster(tmp_path: Path) -> Iterator[StartCluster]:
    """Return a function that starts an installation of the test's own."""
    contexts: list[AbstractContextManager[Cluster]] = []

    def start(
        model_dir: Path,
        prefill: int = 1,
        decode: int = 1,
        node_options: tuple[str, ...] = (),
        common_options: tuple[str, ...] = (),
    ) -> Cluster:
        folder = tmp_path / f"cluster-{len(contexts)}"
        folder.mkdir()
        context = _running_cluster(folder, model_dir, prefill, decode, node_options, common_options)
        contexts.append(context)
        return context.__enter__()

    try:
        yield start
    finally:
        for context in contexts:
            context.__exit__(None, None, None)


def _console_script() -> str:
    return str(Path(sys.executable).with_name("pdserve"))


def _environment() -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_") and name != "REDIS_URL"
    }
    # float32, for what is compared with the reference; int8 has its own tests. And what is far away on a busy machine
    # is waited for, not refused; refusals have their own tests.
    return {
        **kept,
        "PDSERVE_DTYPE": "float32",
        "PDSERVE_MAX_TTFT_S": "600",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
    }
