"""The systems that can be compared, by name, and servers as child processes."""

import os
import signal
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Load = Callable[[str], ModuleType]


def test_names_are_refused_with_what_is_known(load: Load) -> None:
    catalogue = load("peers.catalogue")

    for name, told in (("llama", "known are"), ("llamacpp-q9", "q8_0"), ("llamacpp-q8_0-fast", "unified")):
        with pytest.raises(SystemExit, match=told):
            catalogue.system_of(name, "W1")


def test_every_line_of_tuning_makes_names_that_exist(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = load("peers.catalogue")
    monkeypatch.setattr(catalogue, "peer_python", lambda name: Path("/python"))
    monkeypatch.setattr(catalogue, "peer_version", lambda name: f"{name} 1.0")
    monkeypatch.setattr(catalogue, "demo_gguf", lambda kind: Path(f"/{kind}.gguf"))
    monkeypatch.setattr(catalogue, "demo_model_dir", lambda: Path("/demo"))

    for family in catalogue.TYPES:
        names, *lines = catalogue.axes_of(family)
        for name in [*names, *(f"{names[-1]}-{option}" for line in lines for option in line)]:
            system = catalogue.system_of(name, "W3")
            assert system.settings.startswith(f"{family} 1.0, ") and Path(system.command[1]).exists()
    with pytest.raises(SystemExit, match="cannot be tuned"):
        catalogue.axes_of("pdserve")


def test_a_peer_finds_the_packages_of_the_checkout_that_asks(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environments = load("peers.environments")
    monkeypatch.setattr(environments, "_ROOT", tmp_path)
    base = {"base": str(tmp_path / "ctranslate2"), "platbase": str(tmp_path / "ctranslate2")}
    packages = Path(sysconfig.get_path("purelib", "venv", base))
    (tmp_path / "ctranslate2").mkdir()
    (tmp_path / "ctranslate2" / ".complete").write_text("ctranslate2 4\n")
    with pytest.raises(SystemExit, match="of another Python"):
        environments.peer_python("ctranslate2")
    packages.mkdir(parents=True)
    (packages / "ours.pth").write_text("/a/checkout/that/is/gone\n")

    environments.peer_python("ctranslate2")

    assert (packages / "ours.pth").read_text() == sysconfig.get_path("purelib") + "\n"


_SERVER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
print("serving on http://127.0.0.1:1234", flush=True)
time.sleep(600)
"""


def test_nothing_of_a_server_is_left(load: Load) -> None:
    systems = load("systems")
    system = systems.System("sleeper", (sys.executable, "-c", _SERVER), "none", start_timeout_s=60.0)

    with systems.running(system) as server:
        group = server.pid
        assert server.url == "http://127.0.0.1:1234"
        assert server.cpu_s() > 0

    with pytest.raises(ProcessLookupError):
        _wait_until_gone(group)


def _wait_until_gone(group: int) -> None:
    """Ask for the group until the kernel says that it has no member; the test's time limit ends it otherwise."""
    while True:
        os.killpg(group, 0)
        os.sched_yield()


def test_a_server_that_ends_is_told_with_its_last_words(load: Load) -> None:
    systems = load("systems")
    system = systems.System("failing", (sys.executable, "-c", "raise SystemExit('no such model')"), "none")

    with pytest.raises(SystemExit, match=r"failing ended with 1:\n.*no such model"), systems.running(system):
        pass


@pytest.mark.usefixtures("sigint_is_heard")
def test_an_interrupt_while_a_server_starts_leaves_nothing(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    systems = load("systems")
    monkeypatch.setattr(systems.time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGINT))
    system = systems.System("silent", (sys.executable, "-c", "import time; time.sleep(600)"), "none")
    started: list[int] = []
    popen = systems.subprocess.Popen
    monkeypatch.setattr(systems.subprocess, "Popen", lambda *args, **kwargs: _kept(started, popen(*args, **kwargs)))

    with pytest.raises(KeyboardInterrupt), systems.running(system):
        pass

    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def _kept(started: list[int], process: "object") -> "object":
    started.append(process.pid)
    return process
