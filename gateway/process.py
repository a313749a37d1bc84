"""The gateway process: both halves opened, served until a signal, drained, closed."""

import asyncio
import gc
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.engine.sampling_defaults import SamplingDefaults
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.app import create_app
from pdserve.gateway.config import GatewayConfig
from pdserve.gateway.deps import DEPS
from pdserve.gateway.dispatch_parts import open_dispatch
from pdserve.gateway.http_server import listening
from pdserve.gateway.open_requests import OpenRequests

logger = logging.getLogger(__name__)

_CANARY_TEXT = "The capital of France is"


async def run_gateway(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT, let streams finish, and return the exit code; a second signal cuts them.

    Raises:
        ModelError: the model directory has no usable tokenizer or generation config.
        CannotListen: the address is taken.
    """
    tokenizer = Tokenizer.load(config.model_dir, config.chat_template)
    defaults = SamplingDefaults.load(config.model_dir) if config.uses_generation_config else SamplingDefaults()
    canary_prompt = tuple(tokenizer.encode(_CANARY_TEXT))
    async with open_dispatch(config, canary_prompt) as dispatch:
        app = create_app(config.http, tokenizer, dispatch.backend, defaults)
        open_requests = app[DEPS].open_requests
        async with listening(app, config.http) as url:
            with _stop_signals(open_requests) as stop:
                gc.collect()
                gc.freeze()  # what was loaded stays: looking through it for garbage would stop all streams
                logger.info("listening on %s", url)
                await stop.wait()
                logger.info("draining %d open requests", len(open_requests))
                dispatch.dispatcher.drain()
                await open_requests.drain(config.http.drain_s)
    return 0


@contextmanager
def _stop_signals(open_requests: OpenRequests) -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGTERM or SIGINT sets; a further one ends what is still being answered."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def heard() -> None:
        if stop.is_set():
            open_requests.end_all()
        stop.set()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, heard)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
