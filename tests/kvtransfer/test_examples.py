"""The two example programs, run as a reader would."""

import asyncio
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.timeout(180)
async def test_the_examples_ship_what_is_missing_and_no_more():
    receiver = await _start("receive_blocks.py")
    sender = None
    try:
        endpoint = (await asyncio.wait_for(receiver.stdout.readline(), 50)).decode().strip()
        sender = await _start("send_blocks.py", endpoint)
        said, _ = await asyncio.wait_for(sender.communicate(), 50)
        landed, _ = await asyncio.wait_for(receiver.communicate(), 50)
    finally:
        for process in (receiver, sender):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()

    assert (sender.returncode, receiver.returncode) == (0, 0)
    assert said.decode().splitlines() == [
        "first: 7 of 7 blocks were needed",
        "second: 4 of 10 blocks were needed",  # six full blocks are shared
        f"{11 * 4 * 2 * 2 * 16 * 64 * 4} bytes sent",
    ]
    assert "first: 7 blocks landed" in landed.decode() and "second: 4 blocks landed" in landed.decode()


async def _start(program, *arguments):
    return await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / program), *arguments, stdout=asyncio.subprocess.PIPE
    )
