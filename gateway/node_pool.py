"""The nodes that this gateway knows: found in the registry, held by their channels."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import NoReturn

import zmq.asyncio

from pdserve.control.channel import ControlClient, CurveKeys
from pdserve.control.errors import ChannelLost, RedisUnavailable
from pdserve.control.messages import NodeInfo, ToNode
from pdserve.control.node_registry import NodeRegistry, RegisteredNode
from pdserve.gateway.attempt_inbox import AttemptEvent, AttemptInbox, NodeLost
from pdserve.gateway.dispatch_config import PoolConfig
from pdserve.gateway.node_link import NodeLink
from pdserve.gateway.node_view import AttemptCost, NodeKey, NodeView

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RedisHealth:
    """Whether Redis answered when the registry was last read, and how fast."""

    is_ok: bool
    latency_ms: float | None


class NodePool:
    """Owns one link for each live incarnation.

    The registry only introduces nodes: with Redis away, and after a lease has run out, a node with a live
    channel stays. A lost incarnation is tried again for as long as its lease lives.
    """

    def __init__(
        self,
        registry: NodeRegistry,
        context: zmq.asyncio.Context,
        config: PoolConfig,
        gateway_id: str,
        keys: CurveKeys | None = None,
    ) -> None:
        self._registry = registry
        self._context = context
        self._config = config
        self._gateway_id = gateway_id
        self._keys = keys
        self._links: dict[NodeKey, NodeLink] = {}
        self._sorted: tuple[NodeLink, ...] = ()  # by role and id
        self._retry_at: dict[NodeKey, float] = {}
        self._refused_by: set[NodeKey] = set()  # said once of each
        self._changed = asyncio.Event()
        self._was_redis_ok: bool | None = None
        self.redis = RedisHealth(is_ok=False, latency_ms=None)

    async def run(self) -> NoReturn:
        """Find and hold nodes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                nodes = await self._list()
                self._refused_by &= {NodeKey(node.info.node_id, node.info.incarnation) for node in nodes}
                for node in nodes:
                    self._meet(node, tasks)
                await asyncio.sleep(self._config.poll_s)

    def views(self) -> tuple[NodeView, ...]:
        """Return what is known of each node now, by role and id."""
        return tuple([link.view() for link in self._sorted])

    def ready_nodes(self) -> tuple[NodeInfo, ...]:
        """Return what the nodes that take work have said of themselves."""
        return tuple([link.info for link in self._sorted if link.is_ready])

    def num_refusing(self) -> int:
        """Return how many registered nodes are there and would not have this gateway: their keys differ."""
        return len(self._refused_by)

    def note_redis_lost(self) -> None:
        """A request could not be recorded: Redis does not answer, whatever the last look at it said."""
        self.redis, self._was_redis_ok = RedisHealth(is_ok=False, latency_ms=None), False

    def is_alive(self, key: NodeKey) -> bool:
        """Whether that incarnation has a live channel and takes work."""
        link = self._links.get(key)
        return link is not None and link.is_ready

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return when a node was found, lost, or said something of its load; at the latest after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def send(self, key: NodeKey, message: ToNode) -> None:
        """Send to one incarnation.

        Raises:
            ChannelLost: it is gone.
        """
        link = self._links.get(key)
        if link is None:
            raise ChannelLost(f"node {key.node_id} is lost")
        link.send(message)

    def open_inbox(self, attempt_id: str, costs: dict[NodeKey, AttemptCost], capacity: int) -> AttemptInbox:
        """Return the inbox of an attempt on the nodes in `costs`; the caller closes it."""
        inbox = AttemptInbox(attempt_id, tuple(costs), capacity)
        for key, cost in costs.items():
            link = self._links.get(key)
            if link is None:
                inbox.put(AttemptEvent(key, NodeLost("it was lost before the task was sent")))
            else:
                link.attach(inbox, cost)
        return inbox

    def close_inbox(self, inbox: AttemptInbox) -> None:
        """Let nothing more arrive; what nodes still say of the attempt is dropped."""
        inbox.close()
        for key in inbox.nodes:
            link = self._links.get(key)
            if link is not None:
                link.detach(inbox.attempt_id)

    async def _list(self) -> tuple[RegisteredNode, ...]:
        begun = time.monotonic()
        was_ok = self._was_redis_ok
        try:
            nodes = await self._registry.list()
        except RedisUnavailable as error:
            self.redis, self._was_redis_ok = RedisHealth(is_ok=False, latency_ms=None), False
            if was_ok is not False:
                logger.warning("Redis is away, the known nodes stay: %s", error)
                self._announce()
            return ()
        self.redis = RedisHealth(is_ok=True, latency_ms=(time.monotonic() - begun) * 1000)
        self._was_redis_ok = True
        if not was_ok:
            logger.info("Redis answers")
            self._announce()
        return nodes

    def _meet(self, node: RegisteredNode, tasks: asyncio.TaskGroup) -> None:
        now = time.monotonic()
        key = NodeKey(node.info.node_id, node.info.incarnation)
        link = self._links.get(key)
        if link is None:
            if self._retry_at.get(key, now) > now:
                return
            endpoint = node.info.control_endpoint
            try:
                client = ControlClient.connect(self._context, endpoint, self._config.connect_timeout_s, self._keys)
            except ChannelLost as error:
                self._retry_at[key] = now + self._config.reconnect_s
                logger.warning("node %s cannot be used: %s", key.node_id, error)
                return
            link = NodeLink(node.info, client, self._config, self._gateway_id, self._announce)
            self._links[key] = link
            self._sort()
            tasks.create_task(self._hold(link), name=f"node {key.node_id}")
        link.lease_seen = (node.lease_age_s, now)

    async def _hold(self, link: NodeLink) -> None:
        try:
            reason = await link.run()
        finally:
            del self._links[link.key]
            self._sort()
            self._announce()
        self._tell_loss(link, reason)
        now = time.monotonic()
        self._retry_at = {key: at for key, at in self._retry_at.items() if at > now}
        self._retry_at[link.key] = now + self._config.reconnect_s

    def _sort(self) -> None:
        self._sorted = tuple(sorted(self._links.values(), key=lambda link: (link.info.role, link.key)))

    def _tell_loss(self, link: NodeLink, reason: str) -> None:
        is_news = link.load is not None or (link.was_refused and link.key not in self._refused_by)
        if link.was_refused:
            self._refused_by.add(link.key)
        logger.log(logging.WARNING if is_news else logging.DEBUG, "node %s is lost: %s", link.key.node_id, reason)

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
