"""What a node does between loading and serving."""

import subprocess
import sys
from pathlib import Path

import pytest

_SETTLE = """
import gc, os
from pdserve.control.node_process import settle
niceness = os.nice(3)
settle()
print(niceness)
print(gc.get_freeze_count() > 1_000)
print(open("/proc/self/autogroup").read().strip())
"""


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not group tasks by session")
@pytest.mark.parametrize("leads_session", [True, False])
def test_what_was_loaded_is_set_apart_and_an_own_session_as_nice_as_its_process(leads_session: bool) -> None:
    # Empty in a session that no setsid has begun, as that of a container's first process: it is in no group.
    before = Path("/proc/self/autogroup").read_text().strip()

    ended = subprocess.run(
        [sys.executable, "-c", _SETTLE], start_new_session=leads_session, check=True, capture_output=True, text=True
    )

    niceness, is_set_apart, group = ended.stdout.splitlines()
    assert is_set_apart == "True"
    if leads_session and not group:
        pytest.skip("a new session is in no group here")
    if leads_session:
        assert group.endswith(f" nice {niceness}")
    else:
        assert group == before
