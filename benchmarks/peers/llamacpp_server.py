"""llama.cpp's own HTTP server from the wheels of xllamacpp; prints its URL and serves until it is killed.

python llamacpp_server.py model.gguf '{"threads": 2, "slots": 16, "context": 65536, "unified": false, "batch": 2048,
                                       "ubatch": 512, "poll": true, "cache_ram": true}'
"""

import json
import signal
import sys

import xllamacpp


def main() -> None:
    """Serve argv[1] with the settings of argv[2]."""
    settings = json.loads(sys.argv[2])
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_parallel = settings["slots"]
    params.n_ctx = settings["context"]
    params.kv_unified = settings["unified"]
    params.n_batch = settings["batch"]
    params.n_ubatch = settings["ubatch"]
    params.cpuparams.n_threads = settings["threads"]
    params.cpuparams_batch.n_threads = settings["threads"]
    if not settings["poll"]:  # threads that sleep instead of spinning: what a shared machine wants
        params.cpuparams.poll = params.cpuparams_batch.poll = 0
    if not settings["cache_ram"]:  # by default, the state of a slot is copied aside before another prompt takes it
        params.cache_ram_mib = 0
    params.fit_params = False  # the settings are the ones above, not what the library would rather have
    params.port = 0
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(f"serving on {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
