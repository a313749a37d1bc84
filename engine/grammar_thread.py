"""The thread in which grammars are compiled and followed."""

import threading
from concurrent.futures import ThreadPoolExecutor

# The compiler recurses along chains of rules and $refs. Measured: the longest chains that fit into the largest grammar
# and schema overflow the usual 8 MiB, which ends the process, and need less than 256 MiB. Unused pages cost nothing.
_STACK_BYTES = 256 * 2**20
_LOCK = threading.Lock()


def grammar_thread(name: str) -> ThreadPoolExecutor:
    """Return a running pool of one thread with a stack that no grammar of allowed size overflows.

    It ends when the caller shuts it down or forgets it.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    with _LOCK:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            pool.submit(bool).result()  # the thread starts now, and stays
        finally:
            threading.stack_size(usual)
    return pool
