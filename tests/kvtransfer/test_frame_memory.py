import subprocess
import sys

import pytest

PROGRAM = """
import resource
from pdserve.kvtransfer.frame_memory import keep_frame_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        frames = [bytearray(b"x") * (3 << 20) for _ in range(8)]
        del frames
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
assert keep_frame_memory()
faults()
print(given_back, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_the_next_frames_find_the_memory_of_the_last_ones():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)

    given_back, kept = map(int, done.stdout.split())
    assert kept < given_back / 10
