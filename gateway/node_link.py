"""The gateway's hold on one incarnation of one node: its channel, its last word, and the moment it is lost."""

import asyncio
import logging
import time
from collections.abc import Callable

from pdserve.control.channel import ControlClient
from pdserve.control.errors import ChannelLost
from pdserve.control.messages import (
    CancelTask,
    LinkReport,
    NodeInfo,
    NodeLoad,
    Ping,
    Pong,
    ToGateway,
    TokenBatch,
    ToNode,
)
from pdserve.gateway.attempt_inbox import AttemptEvent, AttemptInbox, NodeLost
from pdserve.gateway.dispatch_config import PoolConfig
from pdserve.gateway.link_attempts import LinkAttempts
from pdserve.gateway.node_view import AttemptCost, NodeKey, NodeView

logger = logging.getLogger(__name__)


class NodeLink:
    """Owns one client and the inboxes of the attempts that are on the node; each is told when the node is
    lost.
    """

    def __init__(
        self,
        info: NodeInfo,
        client: ControlClient,
        config: PoolConfig,
        gateway_id: str,
        on_change: Callable[[], None],
    ) -> None:
        self.info = info
        self.key = NodeKey(info.node_id, info.incarnation)
        self.load: NodeLoad | None = None
        self.lease_seen: tuple[float, float] = (0.0, time.monotonic())  # age in seconds, when that was
        self._client = client
        self._config = config
        self._gateway_id = gateway_id
        self._on_change = on_change
        self._attempts = LinkAttempts(self.key, info.role, config.forget_s)
        self._heard_at = time.monotonic()
        self._lost_reason: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether new work may be sent to it."""
        return self._lost_reason is None and self.load is not None and self.load.ready

    @property
    def was_refused(self) -> bool:
        """Whether the node was there and would not have this gateway: their keys differ."""
        return self._client.was_refused

    def view(self) -> NodeView:
        """Return what is known of the node now."""
        age_s, seen_at = self.lease_seen
        return NodeView(
            info=self.info,
            load=self.load,
            is_ready=self.is_ready,
            lease_age_s=age_s + time.monotonic() - seen_at,
            num_open_attempts=len(self._attempts),
            pending=self._attempts.pending(),
            num_malformed=self._client.num_malformed,
        )

    def attach(self, inbox: AttemptInbox, cost: AttemptCost) -> None:
        """Deliver to `inbox` what the node says of its attempt, and the node's loss."""
        if self._lost_reason is not None:
            inbox.put(AttemptEvent(self.key, NodeLost(self._lost_reason)))
            return
        self._attempts.attach(inbox, cost)

    def detach(self, attempt_id: str) -> None:
        """Deliver nothing more about `attempt_id`."""
        self._attempts.detach(attempt_id)

    def send(self, message: ToNode) -> None:
        """Send at once.

        Raises:
            ChannelLost: the node is gone; the text says why.
        """
        if self._lost_reason is not None:
            raise ChannelLost(self._lost_reason)
        self._client.send(message)

    async def run(self) -> str:
        """Hold the link until the node is lost; return why. Every attached inbox has been told by then."""
        reason = "the gateway stops"
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch(), name=f"watch {self.info.node_id}")
                receiving = tasks.create_task(self._receive(), name=f"receive {self.info.node_id}")
                pinging = tasks.create_task(self._ping(), name=f"ping {self.info.node_id}")
                loops = (watching, receiving, pinging)
                done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
                reason = next(loop.result() for loop in loops if loop in done)
                self._lost_reason = reason  # no new work from now on
                if watching in done:  # but what it said last may be the end of a stream
                    await self._client.wait_all_read()
                for loop in loops:
                    loop.cancel()
        finally:
            self._lose(reason)
        return reason

    def _lose(self, reason: str) -> None:
        self._lost_reason = reason
        self._client.close()
        self._attempts.lose_all(reason)
        self._on_change()

    async def _watch(self) -> str:
        await self._client.watch()
        return self._client.why_lost

    async def _receive(self) -> str:
        incarnation = self.info.incarnation

        def take(message: ToGateway) -> bool:
            nonlocal incarnation
            if isinstance(message, Pong) and message.info.incarnation != incarnation:
                incarnation = message.info.incarnation
                return True
            self._take(message)
            return False

        await self._client.follow(take)
        return f"incarnation {incarnation} answers in its place"

    def _take(self, message: ToGateway) -> None:
        if isinstance(message, TokenBatch):
            deliver = self._attempts.deliver
            num_strays = sum([not deliver(chunk) for chunk in message.chunks])
            if num_strays:
                logger.debug("%s says %d chunks of closed attempts", self.info.node_id, num_strays)
        elif isinstance(message, Pong):
            self._take_pong(message)
        elif isinstance(message, LinkReport):
            logger.debug("%s reports of a link that this gateway never asked about", self.info.node_id)
        elif not self._attempts.deliver(message):
            logger.debug("%s says %s of a closed attempt", self.info.node_id, type(message).__name__)

    def _take_pong(self, pong: Pong) -> None:
        self.load = pong.load
        self._heard_at = time.monotonic()
        for attempt_id in self._attempts.reconcile(pong.attempt_ids, self._heard_at):
            logger.warning("%s still holds attempt %s; cancelling it again", self.info.node_id, attempt_id)
            try:
                self.send(CancelTask(attempt_id, "the gateway has closed it"))
            except ChannelLost:
                break  # a node that lost this gateway frees by itself what belonged to it
        self._on_change()

    async def _ping(self) -> str:
        sequence, judged_from = 0, self._heard_at
        while True:
            try:
                self.send(Ping(self._gateway_id, sequence))
            except ChannelLost as error:
                return str(error)
            sequence += 1
            before = time.monotonic()
            await asyncio.sleep(self._config.ping_s)
            now = time.monotonic()
            if now - before > self._config.ping_s + self._config.silence_s / 2:
                # This process was stalled: what the node said meanwhile is unread, and what stalled this process may
                # have stalled the node, which has its whole time to answer from now on.
                judged_from = now
                continue
            silence_s = now - max(self._heard_at, judged_from)
            if silence_s > self._config.silence_s:
                return f"it has been silent for {silence_s:.1f} s"
            load = self.load
            if load and load.progress_age_s > self._config.stall_s and load.running + load.waiting > 0:
                return f"its engine has made no step for {load.progress_age_s:.1f} s"
