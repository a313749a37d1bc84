"""Pages of the KV pool, taken from the system before a prompt needs them.

The system clears a page when it is first written: while a pool is new that was a fifth of the time of short prompts.
Taking the whole pool at once would hold memory that a laptop's demo never uses, so pages are taken a margin ahead of
the blocks in use, by an engine that has nothing else to do.

Clearing pages takes a core and the memory's bandwidth, and what has just been computed is then on its way to others
that want both: all of the margin is for quiet moments, half of it for any.
"""

import ctypes
import mmap
import sys

_MADV_POPULATE_WRITE = 23  # of Linux 5.14 and later: as if every page were written, without changing what is in it
_PIECE_BYTES = 1024 * 1024  # a command waits for one piece, some half a millisecond
MARGIN_BYTES = 512 * 1024 * 1024


class PageCommit:
    """How much of one stretch of memory, from its start, the system has given."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self._first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        self._num_bytes = max(0, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - self._first)
        self._is_offered = sys.platform == "linux"
        self.num_committed = 0

    def advance(self, num_used: int, *, is_quiet: bool = True) -> bool:
        """Take one more piece if less than the margin, or half of it where it is not quiet, lies ahead of `num_used`
        bytes; False when nothing is to do."""
        end = min(self._num_bytes, num_used + (MARGIN_BYTES if is_quiet else MARGIN_BYTES // 2))
        end -= end % mmap.PAGESIZE  # the next piece begins there
        size = min(_PIECE_BYTES, end - self.num_committed)
        if size <= 0 or not self._is_offered:
            return False
        libc = ctypes.CDLL(None)
        start = ctypes.c_void_p(self._first + self.num_committed)
        if libc.madvise(start, ctypes.c_size_t(size), _MADV_POPULATE_WRITE) != 0:
            self._is_offered = False  # an older system, or no memory: pages come as they are written
            return False
        self.num_committed += size
        return True
