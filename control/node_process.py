"""The life of a node process: the resources it opens, and then registered, serving, drained, gone."""

import asyncio
import errno
import gc
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq.asyncio

from pdserve.control.channel import ControlServer
from pdserve.control.keyspace import Keyspace
from pdserve.control.lease_keeper import LeaseKeeper
from pdserve.control.node_config import NodeConfig
from pdserve.control.node_host import NodeHost
from pdserve.control.node_registry import NodeRegistry
from pdserve.control.redis_connection import connect
from pdserve.kvtransfer.sockets import is_local

logger = logging.getLogger(__name__)

_LINGER_MS = 300
_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUP_INTERVAL_S = 0.1
_MAX_AUTOGROUP_RETRIES = 10


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What every node opens: sockets live in `context`, except those that ask for keys."""

    context: zmq.asyncio.Context
    server: ControlServer
    registry: NodeRegistry


@asynccontextmanager
async def node_resources(config: NodeConfig) -> AsyncIterator[NodeResources]:
    """Open the control socket and a connection to Redis; all is closed when the block is left."""
    warn_if_open(config)
    context = zmq.asyncio.Context()
    redis = connect(config.redis_url)
    try:
        async with ControlServer.listening(context, config.bind_endpoint, config.keys) as server:
            registry = NodeRegistry(redis, Keyspace(config.namespace), config.registry_lease_s)
            yield NodeResources(context, server, registry)
    finally:
        await redis.close()
        context.destroy(linger=_LINGER_MS)


def warn_if_open(config: NodeConfig) -> None:
    """Say that strangers are let in; without keys the host is the operator's word that its network is private."""
    if config.keys is None and not is_local(config.bind_endpoint):
        logger.warning(
            "what this node says and hears on %s is neither authenticated nor encrypted; give --transfer-key-file",
            config.host,
        )


def settle() -> None:
    """Prepare a loaded process for serving beside others.

    What was loaded lives as long as the process. To look through it for garbage would stop all streams: 200,000
    objects with torch, 100 ms or more each time. And where Linux groups tasks by session (autogroup), niceness counts
    within a session only: a process that leads its own makes the session as nice as itself. Not earlier: loading would
    take as much longer on a busy machine.
    """
    gc.collect()
    gc.freeze()
    if os.getsid(0) == os.getpid():
        _set_session_niceness(os.nice(0))


def _set_session_niceness(niceness: int) -> None:
    """Linux takes one such change in 100 ms from all who are not root together, and nodes start together."""
    for is_last in (*(False,) * _MAX_AUTOGROUP_RETRIES, True):
        try:
            _AUTOGROUP.write_text(str(niceness))
            return
        except OSError as error:
            if is_last or error.errno != errno.EAGAIN:
                logger.debug("the niceness of this session stays as it is: %s", error)
                return
        time.sleep(_AUTOGROUP_INTERVAL_S)


async def serve_until_stopped(
    host: NodeHost, lease: LeaseKeeper, parts: Sequence[Coroutine[None, None, None]], drain_s: float
) -> int:
    """Serve until SIGTERM or SIGINT (drain, exit code 0), or until one of `parts` ends (exit code 1, or its
    error).
    """
    settle()
    with _stop_signals() as stop:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(host.serve(), name="serve")
            leasing = group.create_task(lease.run(), name="lease")
            watching = [group.create_task(_stop_after(part, stop), name="watch part") for part in parts]
            await stop.wait()
            leasing.cancel()
            has_failed = any(watch.done() for watch in watching)
            for watch in watching:
                watch.cancel()
            if not has_failed and not await host.drain(drain_s):
                logger.warning("%d tasks did not end within %g s and are cancelled", host.num_tasks, drain_s)
            serving.cancel()
    return 1 if has_failed else 0


async def _stop_after(part: Coroutine[None, None, None], stop: asyncio.Event) -> None:
    await part
    logger.error("a part of this node has ended by itself; the node stops")
    stop.set()


@contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
