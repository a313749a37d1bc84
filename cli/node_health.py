"""`pdserve health`: whether the nodes that are registered under this machine's address answer and are ready.

A probe for container engines: it asks over the same channel as a gateway, so a node whose loop hangs is not healthy.
"""

import asyncio
import secrets
from collections.abc import Callable
from urllib.parse import urlsplit

import zmq.asyncio

from pdserve.cli.processes import advertised_host, required_redis_url
from pdserve.cli.settings import Settings
from pdserve.cli.transfer_key import load_transfer_keys
from pdserve.control.channel import CurveKeys
from pdserve.control.errors import ChannelLost
from pdserve.control.keyspace import Keyspace
from pdserve.control.messages import NodeInfo, Ping, Pong
from pdserve.control.node_conversation import NodeConversation
from pdserve.control.node_registry import NodeRegistry
from pdserve.control.redis_connection import connect

_ANSWER_TIMEOUT_S = 3.0


def ask_nodes(settings: Settings, progress: Callable[[str], None]) -> int:
    """Return 0 if this machine has registered nodes and all of them are ready, else 1.

    Raises:
        SettingError: there is no Redis to find them in.
        RedisUnavailable: Redis does not answer.
    """
    redis_url = required_redis_url(settings)
    host = settings.advertise_host or advertised_host(settings.host, redis_url) or settings.host
    keys = load_transfer_keys(settings.transfer_key_file, settings.transfer_key)
    answers = asyncio.run(_ask_all(redis_url, settings.namespace, host, keys))
    for node_id, problem in answers.items():
        progress(f"{node_id}: {problem or 'ready'}")
    if not answers:
        progress(f"no node is registered with address {host} in namespace {settings.namespace!r}")
    return 1 if any(answers.values()) or not answers else 0


async def _ask_all(redis_url: str, namespace: str, host: str, keys: CurveKeys | None) -> dict[str, str | None]:
    redis = connect(redis_url)
    try:
        nodes = [node.info for node in await NodeRegistry(redis, Keyspace(namespace)).list()]
    finally:
        await redis.close()
    here = [info for info in nodes if urlsplit(info.control_endpoint).hostname == host]
    context = zmq.asyncio.Context()
    try:
        problems = await asyncio.gather(*(_problem(context, info, keys) for info in here))
    finally:
        context.destroy(linger=0)
    return {info.node_id: problem for info, problem in zip(here, problems, strict=True)}


async def _problem(context: zmq.asyncio.Context, info: NodeInfo, keys: CurveKeys | None) -> str | None:
    """Return why the node is not healthy; None if it is."""
    try:
        async with NodeConversation.open(context, info.control_endpoint, keys, _ANSWER_TIMEOUT_S) as node:
            node.say(Ping(gateway_id=f"health-{secrets.token_hex(4)}", sequence=1))
            answer = await node.hear(_ANSWER_TIMEOUT_S)
    except ChannelLost as error:
        return str(error)
    if not isinstance(answer, Pong) or answer.info.incarnation != info.incarnation:
        return "another start of the node answers in its place"
    return None if answer.load.ready else "not ready"
