"""Calls into an event loop from a thread that keeps the interpreter's lock meanwhile.

`call_soon_threadsafe` lets go of the lock while it wakes the loop, which then holds it when the thread wants it back:
150 us of every decode step, and the loop reads its own bell twice, the second time for an exception.
"""

import asyncio
import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class LoopBell:
    """The calls of one thread, made in their order by the event loop in which the bell was opened."""

    def __init__(self, read_end: int, write_end: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._read_end = read_end
        self._write_end: int | None = write_end
        self._calls: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._is_rung = False
        self._write = ctypes.PyDLL(None).write  # unlike `os.write` it does not let go of the lock

    @classmethod
    @contextmanager
    def open(cls) -> Iterator["LoopBell"]:
        """Answer calls until the block is left; what is called later is forgotten."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(write_end, False)
        bell = cls(read_end, write_end)
        bell._loop.add_reader(read_end, bell._on_ring)
        try:
            yield bell
        finally:
            bell._loop.remove_reader(read_end)
            bell._write_end = None
            os.close(read_end)
            os.close(write_end)

    def call(self, function: Callable[[T], object], argument: T) -> None:
        """Have the loop call `function`. From the thread."""
        self._calls.append((function, argument))
        if not self._is_rung and self._write_end is not None:
            self._is_rung = True
            self._write(self._write_end, b"\0", ctypes.c_size_t(1))

    def _on_ring(self) -> None:
        os.read(self._read_end, 64)
        self._is_rung = False  # before the calls are made: one that comes now rings again
        while self._calls:
            function, argument = self._calls.popleft()
            try:
                function(argument)
            except Exception as error:
                context = {"message": "a call from another thread has failed", "exception": error}
                self._loop.call_exception_handler(context)
