"""Servers as child processes: started, found by what they print, weighed by their CPU time, ended with children."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_URL = re.compile(r"^.*\bserving\b.*?(http://[\d.]+:\d+)", re.MULTILINE)
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ROLES = ("prefill", "decode", "gateway")

# Runs first and becomes the server: it is told to end when this process is gone, even by kill -9. Its session is as
# nice as this process, which Linux does not see to by itself.
_BOOTSTRAP = """\
import contextlib, ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
    group.write(str(os.nice(0)))
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class System:
    """A server to compare: how it is started and, for the report, its settings. It prints `serving ... http://...`."""

    name: str
    command: tuple[str, ...]
    settings: str
    start_timeout_s: float = 180.0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunningSystem:
    """A server that answers."""

    system: System
    url: str
    pid: int

    def cpu_s(self) -> float:
        """Return the CPU time spent so far by its process and all below it."""
        return sum(_cpu_s(pid) for pid in self.pids())

    def pids(self) -> Sequence[int]:
        """Return its process and all below it."""
        return _tree(self.pid)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep all its processes from running, and from taking any CPU time, until the block is left."""
        pids = self.pids()
        _send(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            _send(pids, signal.SIGCONT)

    def thread_cpu_s(self) -> Counter[tuple[str, str]]:
        """Return the CPU time so far by role and kind of thread, by the threads' own clocks.

        The first thread of a process is its event loop; in nodes the others are ZeroMQ's and the engine's.
        """
        spent: Counter[tuple[str, str]] = Counter()
        for pid in self.pids():
            with suppress(OSError):  # it has ended
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                role = next((word for word in words if word in _ROLES), "others")
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    is_first, name = thread.name == str(pid), (thread / "comm").read_text()
                    kind = "event loop" if is_first else "ZeroMQ" if name.startswith("ZMQ") else "engine"
                    spent[role, kind] += int((thread / "schedstat").read_text().split()[0]) / 1e9
        return spent


@contextmanager
def running(system: System) -> Iterator[RunningSystem]:
    """Start `system` in a session of its own; nothing of that session is left at the end.

    Raises:
        SystemExit: it ended, or did not serve in time; the text carries its last lines.
    """
    with tempfile.NamedTemporaryFile(prefix=f"{system.name}-", suffix=".log") as log:
        process = subprocess.Popen(
            (sys.executable, "-I", "-S", "-c", _BOOTSTRAP, str(os.getpid()), *system.command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **system.environment},
        )
        try:
            yield RunningSystem(system, _wait_for_url(system, process, Path(log.name)), process.pid)
        finally:
            _end(process)


def _wait_for_url(system: System, process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + system.start_timeout_s
    text = ""
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        found = _URL.search(text)
        if found:
            return found[1]
        if process.poll() is not None:
            raise SystemExit(f"{system.name} ended with {process.returncode}:\n{text[-2000:]}")
        time.sleep(_POLL_S)
    raise SystemExit(f"{system.name} does not serve after {system.start_timeout_s:g} s:\n{text[-2000:]}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask, wait, and kill what is left of its session, also when the waiting is interrupted."""
    process.send_signal(signal.SIGTERM)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):  # the usual case: nothing is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()  # no limit is needed: it has been killed


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(pid, number)


def _tree(root: int) -> Sequence[int]:
    parents = {int(path.name): _stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found = [root]
    for pid in found:  # grows while it is walked
        found += [child for child, fields in parents.items() if fields and int(fields[1]) == pid]
    return found


def _cpu_s(pid: int) -> float:
    """Return user and system time, with those of children that have ended."""
    fields = _stat(pid)
    return sum(int(value) for value in fields[11:15]) / _TICKS_PER_S if fields else 0.0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
