"""Memory that was freed and that the C library still keeps for itself."""

import ctypes
import gc

_ARENA_MAX = -8  # of glibc's malloc.h


def share_one_heap() -> None:
    """Let threads that are started from now on allocate from the main heap, not from one of their own.

    What one thread has freed another one uses then. Weights that were loaded in a thread left 34 MB of holes in its
    heap, which `return_freed_memory` could not give back; and threads here allocate one at a time, under Python's lock.
    """
    if (mallopt := _of_libc("mallopt")) is not None:
        mallopt(_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Give it back to the system: what loading weights took for a moment would stay in the process until its end."""
    gc.collect()
    if (trim := _of_libc("malloc_trim")) is not None:
        trim(0)


def _of_libc(name: str) -> "ctypes._NamedFuncPointer | None":
    """Return a function of glibc; None where the C library is another one that does not have it."""
    function: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), name, None)
    return function
