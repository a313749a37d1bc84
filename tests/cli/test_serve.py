"""`pdserve serve` as a user meets it: real processes, real model, real signals."""

import contextlib
import json
import os
import queue
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

START_TIMEOUT_S = 200.0


class Serving:
    """A running `pdserve serve`: its output so far and its processes."""

    def __init__(self, temp_dir: Path, *arguments: str) -> None:
        self.temp_dir = temp_dir
        self.lines: list[str] = []
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
        environment.pop("REDIS_URL", None)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from pdserve.cli.main import main; main()", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | {"TMPDIR": str(temp_dir)},
        )
        self._output: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="read output")
        self._reader.start()

    def close(self) -> None:
        """Kill what still runs and read the rest of its output."""
        with self.process as process:
            process.kill()
            self._reader.join()

    def wait_for(self, pattern: str, timeout_s: float = START_TIMEOUT_S) -> re.Match[str]:
        """Read lines until one matches; return the match."""
        deadline = time.monotonic() + timeout_s
        try:
            while (line := self._output.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                self.lines.append(line)
                if match := re.search(pattern, line):
                    return match
        except queue.Empty:
            pass
        raise AssertionError(f"no line matched {pattern!r}:\n" + "\n".join(self.lines))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._output.put(line.rstrip("\n"))
        self._output.put(None)

    def url(self) -> str:
        return self.wait_for(r"serving \S+ on (http://[\d.:]+)/v1")[1]

    def children(self) -> dict[int, str]:
        """Return the command line of each child, by process id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):  # not every kernel has /proc/PID/task/TID/children
            with contextlib.suppress(OSError):  # it ended meanwhile
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == self.process.pid:
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        return found

    def child(self, word: str) -> int:
        return next(pid for pid, command in self.children().items() if f" {word} " in f" {command}")


@pytest.fixture
def temp_dir(tmp_path: Path) -> Path:
    path = tmp_path / "t"
    path.mkdir()
    return path


@pytest.fixture
def serving(demo_model_dir: Path, temp_dir: Path) -> Iterator[Serving]:
    serving = Serving(temp_dir, "--model", str(demo_model_dir), "--port", "0", "--num-threads", "1")
    try:
        yield serving
    finally:
        serving.close()


def wait_all_gone(pids: list[int], timeout_s: float) -> None:
    for pid in pids:
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([process], [], [], timeout_s)[0], f"process {pid} is still there"
        finally:
            os.close(process)


def wait_ready(url: str) -> None:
    for _ in range(2_000):
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=60) as response:
                if response.status == 200:
                    return
        except (urllib.error.HTTPError, OSError):
            pass
        time.sleep(0.1)  # a client's own pause between tries
    raise AssertionError("not ready again")


def complete(url: str, model: str) -> str:
    body = f'{{"model": "{model}", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}}'
    request = urllib.request.Request(f"{url}/v1/completions", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


def routes(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/admin/status", timeout=60) as response:
        counts: dict[str, int] = json.load(response)["routes"]
    return counts


def complete_again(url: str, model: str) -> str:
    """Return the first answer that is no 503."""
    for _ in range(2_000):
        try:
            return complete(url, model)
        except urllib.error.HTTPError as error:
            assert error.code == 503, error.read().decode()
        time.sleep(0.1)  # a client's own pause between tries
    raise AssertionError("still refused")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_printed_curl_answers_and_the_end_leaves_no_trace(serving: Serving) -> None:
    url = serving.url()
    curl = f"{serving.wait_for('^curl ').string}\n{serving.wait_for('-d ').string}"
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=200, check=True).stdout
    assert "Paris" in answer
    assert answer.rstrip().endswith("data: [DONE]")
    assert routes(url) == {"disaggregated": 1, "local": 0, "migrated": 0}
    children = list(serving.children())
    assert len(children) == 4
    base = os.getpriority(os.PRIO_PROCESS, serving.process.pid)
    niceness = sorted(os.getpriority(os.PRIO_PROCESS, pid) for pid in children)
    assert niceness == [base] * 3 + [min(19, base + 5)]  # the prefill node's
    started_at = time.monotonic()

    serving.process.send_signal(signal.SIGTERM)

    assert serving.process.wait(timeout=200) == 0
    assert time.monotonic() - started_at < 5.0
    wait_all_gone(children, timeout_s=0.0)
    assert list(serving.temp_dir.iterdir()) == []
    serving.wait_for(r"^pdserve +\| stopped$")
    assert not [line for line in serving.lines if "was killed" in line]


def test_killed_children_come_back_and_nothing_outlives_a_killed_parent(serving: Serving, demo_model_dir: Path) -> None:
    url = serving.url()
    for word, name in (("decode", "decode-1"), ("prefill", "prefill-1"), ("gateway", "gateway")):
        os.kill(serving.child(word), signal.SIGKILL)

        serving.wait_for(rf"{name} ended \(killed by SIGKILL\); its last lines:")
        serving.wait_for(rf"starting {name} again in 0\.5 s")
        serving.wait_for(r"is registered|listening on")
        wait_ready(url)
        assert "Paris" in complete(url, demo_model_dir.name)

    children = list(serving.children())
    assert len(children) == 4
    serving.process.kill()

    wait_all_gone(children, timeout_s=60.0)


def test_redis_comes_back_at_the_same_place(serving: Serving, demo_model_dir: Path) -> None:
    url = serving.url()
    redis = next(pid for pid, command in serving.children().items() if "redis-server" in command)

    os.kill(redis, signal.SIGKILL)

    serving.wait_for(r"starting redis again")
    assert "Paris" in complete_again(url, demo_model_dir.name)


def test_node_that_cannot_start_ends_everything_with_its_last_lines(demo_model_dir: Path, temp_dir: Path) -> None:
    broken = temp_dir.parent / "broken"
    shutil.copytree(demo_model_dir, broken, copy_function=os.symlink)
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    serving = Serving(temp_dir, "--model", str(broken), "--port", "0")

    serving.wait_for(r"error: (prefill|decode)-1 ended \(exit code 1\); its last lines:")

    assert serving.process.wait(timeout=200) == 1
    serving.close()
    assert list(temp_dir.iterdir()) == []
