"""Engines of one machine that divide its cores: who computes is known to all, and nobody is counted after its end."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from pdserve.engine.available_cores import num_available_cores
from pdserve.engine.config import EngineConfig
from pdserve.engine.core_share import SIZE_BYTES, CoreShare
from pdserve.engine.engine import Engine
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.errors import ModelError
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.kernels.cpu import CpuKernels

# Another process: takes a place, computes or not as it is told by a line, and says how many do.
_OTHER = """
import sys
from pathlib import Path
from pdserve.engine.core_share import CoreShare
share = CoreShare.open(Path(sys.argv[1]))
for line in sys.stdin:
    share.set_busy(line.strip() == "busy")
    print(share.num_busy, flush=True)
"""


class _Other:
    """A process with a place of its own."""

    def __init__(self, path: Path) -> None:
        command = (sys.executable, "-c", _OTHER, str(path))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._in: IO[str] = self._process.stdin  # type: ignore[assignment]  # both are pipes
        self._out: IO[str] = self._process.stdout  # type: ignore[assignment]

    def tell(self, word: str) -> int:
        """Return how many compute once it has done what it was told."""
        print(word, file=self._in, flush=True)
        return int(self._out.readline())

    def kill(self) -> None:
        """End it without a chance to clean up."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._in.close()
        self._out.close()


@pytest.fixture
def share(tmp_path: Path) -> Any:
    """This process's place."""
    opened = CoreShare.open(tmp_path / "busy")
    yield opened
    opened.close()


def test_processes_see_who_computes_and_use_their_part(share: CoreShare, tmp_path: Path) -> None:
    num_cores = num_available_cores()
    kernels = CpuKernels.load(num_threads=num_cores)
    share.set_busy(True)
    other = _Other(tmp_path / "busy")

    try:
        assert other.tell("busy") == 2 == share.num_busy
        if kernels is not None:
            assert kernels.threads_now == max(1, num_cores // 2)
        assert other.tell("idle") == 1 == share.num_busy
        if kernels is not None:
            assert kernels.threads_now == num_cores
    finally:
        other.kill()


def test_the_place_of_a_killed_process_is_cleared_by_who_takes_it(share: CoreShare, tmp_path: Path) -> None:
    killed = _Other(tmp_path / "busy")
    killed.tell("busy")
    killed.kill()
    assert share.num_busy == 1

    successor = _Other(tmp_path / "busy")

    try:
        assert successor.tell("idle") == 0
    finally:
        successor.kill()


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"core_share_file .*nowhere"):
        CoreShare.open(tmp_path / "nowhere" / "busy")


async def test_an_engine_is_busy_in_its_steps_and_idle_when_it_waits(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(EngineConfig(model_dir=tiny_model(), block_size=4, num_blocks=128))
    path, in_steps, step = tmp_path / "busy", [], engine.step
    monkeypatch.setattr(engine, "step", lambda: (in_steps.append(path.read_bytes()[0]), step())[1])
    sampling = SamplingParams(max_tokens=3, temperature=0.0, seed=0, ignore_eos=True)

    async with EngineThread.start(engine, path) as thread:
        async with thread.computing(SequenceSpec("a", (1, 2, 3, 4, 5), sampling)) as (stream,):
            while (await stream.next()).finish_reason is None:
                pass
        when_waiting = await thread.call(lambda _: path.read_bytes()[0])

    assert set(in_steps) == {1} and when_waiting == 0
    assert path.read_bytes() == bytes(SIZE_BYTES)
