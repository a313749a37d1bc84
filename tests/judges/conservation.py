"""The conservation law after all that the judges did: conservation.py URL waits for a system at rest."""

import json
import sys
import time
import urllib.request

_REST_S = 30.0


def _status(url: str) -> dict:
    with urllib.request.urlopen(url + "/admin/status", timeout=10) as reply:
        return json.load(reply)


def _held(status: dict) -> list[str]:
    held = [
        f"{name} requests: {status['requests'][name]}" for name in ("queued", "prefilling", "transferring", "decoding")
    ]
    held = [each for each in held if not each.endswith(": 0")]
    for node in status["nodes"]:
        counts = {name: node[name] for name in ("running", "waiting")}
        counts |= {name: node["blocks"][name] for name in ("in_use", "in_flight")} | {"open": node["transfer"]["open"]}
        held += [f"{node['node_id']} {name}: {count}" for name, count in counts.items() if count]
    return held


def main() -> None:
    """Fail with what is still held."""
    url, deadline = sys.argv[1], time.monotonic() + _REST_S
    while held := _held(status := _status(url)):
        if time.monotonic() > deadline:
            raise SystemExit(f"conservation | held at rest: {held}")
        time.sleep(0.2)
    ended = {name: status["requests"][name] for name in ("finished", "failed", "cancelled")}
    print(f"conservation | nothing is held; ended: {ended}")


if __name__ == "__main__":
    main()
