"""`pdserve doctor`: proves the control channel of each node that runs now, and each link of the KV plane between them.

It finds the nodes in Redis as a gateway does, asks each over its control channel, sees whether a stranger is heard
there, and has every prefill node measure the way to every decode node, with the sockets and keys that serve.
"""

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import zmq.asyncio

from pdserve.cli.processes import required_redis_url
from pdserve.cli.settings import Settings
from pdserve.cli.table import aligned
from pdserve.cli.transfer_key import load_transfer_keys
from pdserve.control.channel import CurveKeys
from pdserve.control.errors import ChannelLost
from pdserve.control.keyspace import Keyspace
from pdserve.control.messages import LinkReport, NodeInfo, NodeRole, Ping, Pong, ProbeLink
from pdserve.control.node_conversation import NodeConversation
from pdserve.control.node_registry import NodeRegistry
from pdserve.control.redis_connection import connect
from pdserve.kvtransfer.curve_keys import generate_keys

_ANSWER_TIMEOUT_S = 3.0
_CONNECT_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class NodeFinding:
    """One registered node; `problem` is None for one that answers and takes work."""

    node_id: str
    role: str
    address: str
    version: str
    model: str
    answer_ms: float | None
    is_encrypted: bool = False  # its control channel
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class LinkFinding:
    """The way from one prefill node to one decode node; `problem` is None where it is sound."""

    prefill: str
    decode: str
    problem: str | None
    differs: str | None = None  # the field of the handshake in which the ends differ
    is_encrypted: bool = False
    shares_memory: bool = False  # the figures are of the socket beside it
    connect_ms: float | None = None
    round_trip_ms: float | None = None
    mb_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was found."""

    nodes: tuple[NodeFinding, ...]
    links: tuple[LinkFinding, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, a sentence each."""
        if not self.nodes:
            return ("no node is registered",)
        found = [f"{node.node_id}: {node.problem}" for node in self.nodes if node.problem]
        found += [f"{link.prefill} -> {link.decode}: {link.problem}" for link in self.links if link.problem]
        if not any(node.role == NodeRole.DECODE for node in self.nodes):
            found.append("no decode node is registered")
        return tuple(found)


def run_doctor(settings: Settings, say: Callable[[str], None]) -> int:
    """Print what was found; return 0 if every node answers and every link is sound, else 1.

    Raises:
        SettingError: there is no Redis to find the nodes in, or a key that cannot be read.
        RedisUnavailable: Redis does not answer.
    """
    keys = load_transfer_keys(settings.transfer_key_file, settings.transfer_key)
    found = asyncio.run(_examine(settings, required_redis_url(settings), keys))
    print(_as_json(found) if settings.json else _as_text(found))
    for problem in found.problems:
        say(problem)
    return 1 if found.problems else 0


async def _examine(settings: Settings, redis_url: str, keys: CurveKeys | None) -> Diagnosis:
    redis = connect(redis_url)
    try:
        infos = [node.info for node in await NodeRegistry(redis, Keyspace(settings.namespace)).list()]
    finally:
        await redis.close()
    infos.sort(key=lambda info: (info.role, info.node_id))
    context = zmq.asyncio.Context()
    try:
        nodes = await asyncio.gather(*(_ask(context, info, keys) for info in infos))
        decodes = [info for info in infos if info.role is NodeRole.DECODE]
        prefills = [info for info in infos if info.role is NodeRole.PREFILL]
        links: list[LinkFinding] = []
        for prefill in prefills:  # one after another: links measured together share the wire
            links += await _probe_all(context, prefill, decodes, settings, keys)
    finally:
        context.destroy(linger=0)
    return Diagnosis(tuple(nodes), tuple(links))


async def _ask(context: zmq.asyncio.Context, info: NodeInfo, keys: CurveKeys | None) -> NodeFinding:
    finding = NodeFinding(info.node_id, info.role, info.control_endpoint, info.version, info.model_name, None)
    loop = asyncio.get_running_loop()
    start = loop.time()
    try:
        pong = await _ping(context, info, keys)
    except ChannelLost as error:
        return replace(finding, problem=f"{info.control_endpoint}: {error}")
    finding = replace(finding, answer_ms=1000 * (loop.time() - start), is_encrypted=keys is not None)
    if pong is None:
        return replace(finding, problem="another start of the node answers in its place")
    if not pong.load.ready:
        return replace(finding, problem="answers, and takes no work now")
    for stranger, who in ((None, "without a key"), (generate_keys(), "with a key that nobody trusts")):
        if keys is not None and await _is_heard(context, info, stranger):
            return replace(finding, problem=f"answers a peer {who}")
    return finding


async def _ping(context: zmq.asyncio.Context, info: NodeInfo, keys: CurveKeys | None) -> Pong | None:
    """Return the node's answer; None if it is not the node's.

    Raises:
        ChannelLost: there is none.
    """
    async with NodeConversation.open(context, info.control_endpoint, keys, _CONNECT_TIMEOUT_S) as node:
        node.say(Ping(f"doctor-{secrets.token_hex(4)}", 1))
        answer = await node.hear(_ANSWER_TIMEOUT_S)
    return answer if isinstance(answer, Pong) and answer.info.incarnation == info.incarnation else None


async def _is_heard(context: zmq.asyncio.Context, info: NodeInfo, keys: CurveKeys | None) -> bool:
    try:
        await _ping(context, info, keys)
    except ChannelLost:
        return False
    return True


async def _probe_all(
    context: zmq.asyncio.Context,
    prefill: NodeInfo,
    decodes: Sequence[NodeInfo],
    settings: Settings,
    keys: CurveKeys | None,
) -> list[LinkFinding]:
    try:
        async with NodeConversation.open(context, prefill.control_endpoint, keys, _CONNECT_TIMEOUT_S) as node:
            return [await _probe(node, prefill, decode, settings) for decode in decodes]
    except ChannelLost as error:  # the endpoint is none
        return [LinkFinding(prefill.node_id, decode.node_id, str(error)) for decode in decodes]


async def _probe(node: NodeConversation, prefill: NodeInfo, decode: NodeInfo, settings: Settings) -> LinkFinding:
    finding = LinkFinding(prefill.node_id, decode.node_id, None)
    if decode.transfer_endpoint is None:
        return replace(finding, problem="the decode node has no KV plane")
    timeout_s = settings.probe_timeout_s
    probe_id = secrets.token_hex(8)
    probe = ProbeLink(
        probe_id, decode.transfer_endpoint, decode.node_id, decode.incarnation, settings.probe_size, timeout_s
    )
    try:
        node.say(probe)
        async with asyncio.timeout(2 * (timeout_s + _ANSWER_TIMEOUT_S)):
            report = await node.hear(timeout_s + _ANSWER_TIMEOUT_S)
            while not isinstance(report, LinkReport) or report.probe_id != probe_id:
                report = await node.hear(timeout_s + _ANSWER_TIMEOUT_S)  # the late word about a probe before
    except (ChannelLost, TimeoutError) as error:
        differs = "key" if node.was_refused else None
        return replace(finding, problem=f"{prefill.node_id}: {error}", differs=differs)
    if report.code is not None:
        return replace(finding, problem=f"{report.code}: {report.message}", differs=report.field)
    return replace(
        finding,
        is_encrypted=report.is_encrypted,
        shares_memory=report.shares_memory,
        connect_ms=_scaled(report.connect_s, 1e3),
        round_trip_ms=_scaled(report.round_trip_s, 1e3),
        mb_per_s=_scaled(report.bytes_per_s, 1e-6),
    )


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _as_json(found: Diagnosis) -> str:
    return json.dumps({"ok": not found.problems, "problems": found.problems, **asdict(found)}, indent=2)


def _as_text(found: Diagnosis) -> str:
    nodes = [("NODE", "ROLE", "ADDRESS", "KEYS", "ANSWERS IN", "STATE")]
    nodes += [
        (
            node.node_id,
            node.role,
            node.address,
            _keys(node.answer_ms is None, node.is_encrypted),
            _number(node.answer_ms, "ms"),
            "broken" if node.problem else "ok",
        )
        for node in found.nodes
    ]
    links = [("LINK", "STATE", "KEYS", "BLOCKS GO BY", "CONNECT", "ROUND TRIP", "RATE")]
    links += [
        (
            f"{link.prefill} -> {link.decode}",
            "broken" if link.problem else "ok",
            _keys(link.problem is not None, link.is_encrypted),
            "-" if link.problem else "shared memory" if link.shares_memory else "socket",
            _number(link.connect_ms, "ms"),
            _number(link.round_trip_ms, "ms"),
            _number(link.mb_per_s, "MB/s"),
        )
        for link in found.links
    ]
    return "\n".join([*aligned(nodes), "", *aligned(links)])


def _keys(is_unknown: bool, is_encrypted: bool) -> str:
    return "-" if is_unknown else "encrypted" if is_encrypted else "in the clear"


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
