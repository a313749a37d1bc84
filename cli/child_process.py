"""One child process: cannot outlive its parent, is read line by line, is stopped by a deadline.

Knows nothing of restarts; those are the supervisor's.
"""

import asyncio
import collections
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

_NUM_LAST_LINES = 20
_READ_BYTES = 65_536
_LONGEST_LINE = 8_192

# Runs first and becomes the program: the kernel kills it when its parent is gone, even by kill -9.
_BOOTSTRAP = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.nice(int(sys.argv[2]))
os.execv(sys.argv[3], sys.argv[3:])
"""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start a child. `environment` is all it gets; a quiet one's lines are shown when it fails.

    `niceness` is added to the parent's: where processes want the same core, a nicer one gets less of it.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    is_quiet: bool = False
    niceness: int = 0


def pdserve_command(*arguments: str) -> tuple[str, ...]:
    """Return the command that runs `pdserve` by this interpreter, whatever the working directory holds."""
    return (sys.executable, "-P", "-c", "from pdserve.cli.main import main; main()", *arguments)


class ChildProcess:
    """Owns one process at a time; `run` is one life of it, and may be called again after that."""

    def __init__(self, spec: ChildSpec, echo: Callable[[str, str], None]) -> None:
        self.spec = spec
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        self._echo = echo
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self._has_ended = asyncio.Event()
        self._has_ended.set()

    @property
    def pid(self) -> int | None:
        """The id of the running process; None if there is none."""
        return None if self._process is None else self._process.pid

    async def run(self) -> int:
        """Start the process, read its output to the end, return its exit code (negative: a signal)."""
        self.last_lines.clear()
        self._has_ended.clear()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _BOOTSTRAP, str(os.getpid()), str(self.spec.niceness)),
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(self.spec.environment),
                start_new_session=True,  # Ctrl-C reaches the parent only, which stops its children in order
            )
            if self._is_stopping:  # asked to while it was being started
                self._signal(signal.SIGTERM)
            assert process.stdout is not None
            async for line in _lines(process.stdout):
                self.last_lines.append(line)
                if not self.spec.is_quiet:
                    self._echo(self.spec.name, line)
            return await process.wait()
        finally:
            await self._bury()
            self._has_ended.set()

    async def stop(self, timeout_s: float) -> bool:
        """End the process for good: ask, wait, kill after `timeout_s`. Return whether it ended by itself."""
        self._is_stopping = True
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_ended.wait()
            return True
        except TimeoutError:
            self.kill()
            await self._has_ended.wait()
            return False

    def kill(self) -> None:
        """End the process and everything it started, at once."""
        self._signal(signal.SIGKILL)

    async def _bury(self) -> None:
        """Leave no process and no open pipe, however the life ended."""
        self.kill()
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            await process.communicate()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        try:
            if number is signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                os.kill(self._process.pid, number)
        except ProcessLookupError:
            return  # it ended between the look and the signal


def describe_exit(exit_code: int) -> str:
    """Return an exit code in words."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield lines as text; an overlong one is cut into pieces instead of growing without bound."""
    rest = b""
    while chunk := await reader.read(_READ_BYTES):
        *complete, rest = (rest + chunk).split(b"\n")
        for line in complete:
            yield line.decode(errors="replace").rstrip("\r")
        if len(rest) > _LONGEST_LINE:
            yield rest.decode(errors="replace")
            rest = b""
    if rest:
        yield rest.decode(errors="replace")
