"""Opens a page in a headless Chromium and checks what it saw: drive.py CHROMIUM URL.

Speaks the DevTools protocol over the browser's own pipe, messages of JSON that end with a zero byte.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
_DEADLINE_S = 300


class Browser:
    """A running Chromium and the two ends of its pipe."""

    def __init__(self, program: str, profile: str) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to 4, wherever ours happen to be.
        line = f'exec "$0" --remote-debugging-pipe "$@" 3<&{commands} 4>&{answers}'
        flags = [*_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", line, program, *flags], pass_fds=(commands, answers), stderr=subprocess.DEVNULL
        )
        os.close(commands)
        os.close(answers)
        self._read = b""
        self._num_sent = 0

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Return the result of one command; events are passed over."""
        self._num_sent += 1
        command = {"id": self._num_sent, "method": method, "params": params}
        os.write(self._commands, json.dumps(command | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (answer := self._next()).get("id") != self._num_sent:
            continue
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            new = os.read(self._answers, 2**16)
            assert new, "the browser has gone"
            self._read += new
        message, self._read = self._read.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(message)
        return answer


def check(seen: dict[str, Any]) -> str:
    """Fail unless the text came in pieces at different times, and is that of the whole answer."""
    told = [piece for piece in seen["pieces"] if piece["text"]]
    times = sorted({round(piece["at_ms"]) for piece in told})
    assert seen["hasEnded"] and not seen["held"], seen
    assert "".join(piece["text"] for piece in told) == seen["shown"] == seen["whole"] != "", seen
    # Buffered, everything would arrive in one or two reads at the end.
    assert len(times) > 16 and times[-1] - times[0] > 100, (len(told), times)
    return f"{len(told)} pieces of text at {len(times)} times over {times[-1] - times[0]} ms, equal to the whole answer"


def main() -> None:
    """Open the page, wait for what it saw, and check it."""
    program, url = sys.argv[1:]
    signal.alarm(_DEADLINE_S)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            target = browser.call("Target.createTarget", url="about:blank")["targetId"]
            session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            assert "errorText" not in browser.call("Page.navigate", session, url=url)  # returns when the page is there
            expression = (
                "(async () => { while (typeof finished === 'undefined') await new Promise(r => setTimeout(r, 20));"
                " return JSON.stringify(await finished); })()"
            )
            asked = {"expression": expression, "awaitPromise": True, "returnByValue": True}
            result = browser.call("Runtime.evaluate", session, **asked)
            assert "exceptionDetails" not in result, result["exceptionDetails"]
            version = browser.call("Browser.getVersion")["product"]
            print(f"{version}: {check(json.loads(result['result']['value']))}")
        finally:
            browser.process.kill()
            browser.process.wait()


if __name__ == "__main__":
    main()
