"""Memory of received frames that is used again instead of being given back to the system after each.

ZeroMQ allocates a frame for what arrives and frees it once it has landed. glibc gives memory of that size back at once,
and the next frame pays for every page anew: a tenth of the processor time of a transfer.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 64 * 1024 * 1024
_LARGEST_BYTES = 32 * 1024 * 1024  # the most that glibc takes here


def keep_frame_memory() -> bool:
    """Have this process keep up to 64 MiB of freed memory for the next frames; False where there is no glibc.

    For processes that receive blocks. It concerns every allocation of the process, so it is its owner's to call.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
