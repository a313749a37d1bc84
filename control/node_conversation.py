"""A word with one node outside of a gateway: connect, ask, hear the answer or why there is none."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq.asyncio

from pdserve.control.channel import ControlClient, CurveKeys
from pdserve.control.errors import ChannelLost
from pdserve.control.messages import ToGateway, ToNode

logger = logging.getLogger(__name__)


class NodeConversation:
    """One connection, watched for as long as the conversation lasts."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def open(
        cls, context: zmq.asyncio.Context, endpoint: str, keys: CurveKeys | None, timeout_s: float
    ) -> AsyncIterator["NodeConversation"]:
        """Begin to connect; the first `hear` tells whether that succeeds within `timeout_s`.

        Raises:
            ChannelLost: `endpoint` is none.
        """
        client = ControlClient.connect(context, endpoint, timeout_s, keys)
        watching = asyncio.create_task(client.watch(), name=f"watch {endpoint}")
        try:
            yield cls(client)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            client.close()

    @property
    def was_refused(self) -> bool:
        """Whether the node was there and would not have this end."""
        return self._client.was_refused

    def say(self, message: ToNode) -> None:
        """Send at once. Where that cannot be done, `hear` tells why: a connection that was refused is known to be lost
        only a moment after nothing can be sent over it."""
        try:
            self._client.send(message)
        except ChannelLost as error:
            logger.debug("not said: %s", error)

    async def hear(self, timeout_s: float) -> ToGateway:
        """Wait for the next message.

        Raises:
            ChannelLost: there is none within `timeout_s`, or the connection is lost; the message says why.
        """
        hearing = asyncio.create_task(self._client.recv(), name="hear a node")
        losing = asyncio.create_task(self._client.lost.wait(), name="lose a node")
        try:
            await asyncio.wait((hearing, losing), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                return hearing.result()
            if losing.done():
                raise ChannelLost(self._client.why_lost)
            raise ChannelLost(f"it does not answer within {timeout_s:g} s")
        finally:
            for task in (hearing, losing):
                task.cancel()
            await asyncio.gather(hearing, losing, return_exceptions=True)
