"""The cores of a machine, shared by the engines that compute on it: each says when it does, in memory that all map.

The compiled kernels read that memory at each operation, and use no more threads than their part of the cores.
"""

import fcntl
import mmap
import os
from pathlib import Path
from typing import BinaryIO

from pdserve.engine.available_cores import num_available_cores
from pdserve.engine.errors import ModelError
from pdserve.kernels.cpu import CpuKernels

SIZE_BYTES = 64  # a place each
_BUSY, _IDLE = 1, 0


class CoreShare:
    """One process's place in the file: a byte that is 1 while it computes.

    The place is held by a lock on that byte, which ends with the process, however it ends; whoever takes the place
    next clears what a killed one has left.
    """

    def __init__(self, file: BinaryIO, memory: mmap.mmap, place: int) -> None:
        self._file = file
        self._memory = memory
        self._place = place

    @classmethod
    def open(cls, path: Path) -> "CoreShare":
        """Take a free place in the file at `path`, which is made if need be; `close` gives it back.

        Raises:
            ModelError: the file cannot be used, or all its places are taken.
        """
        try:
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
            os.truncate(file.fileno(), SIZE_BYTES)
            place = _take_place(file)
            memory = mmap.mmap(file.fileno(), SIZE_BYTES)
        except OSError as error:
            raise ModelError(f"core_share_file {path}: {error}") from error
        memory[place] = _IDLE
        if (kernels := CpuKernels.load(num_threads=1)) is not None:  # of all of this process: they have one pool
            kernels.share_cores(file.fileno(), SIZE_BYTES, num_available_cores())
        return cls(file, memory, place)

    @property
    def num_busy(self) -> int:
        """How many processes compute now."""
        return sum(self._memory[:])

    @property
    def is_wanted_by_others(self) -> bool:
        """Whether another process computes now."""
        return self.num_busy > self._memory[self._place]

    def set_busy(self, is_busy: bool) -> None:
        """Say whether this process computes."""
        self._memory[self._place] = _BUSY if is_busy else _IDLE

    def close(self) -> None:
        """Compute no more and give the place back."""
        self.set_busy(False)
        self._memory.close()
        self._file.close()


def _take_place(file: BinaryIO) -> int:
    for place in range(SIZE_BYTES):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except BlockingIOError:
            continue
        return place
    raise OSError(f"{SIZE_BYTES} processes share cores through it already")
