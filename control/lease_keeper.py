"""The loop by which a node stays registered."""

import asyncio
import logging
import random
import time

from pdserve.control.errors import NodeIdTaken, RedisUnavailable
from pdserve.control.messages import NodeInfo
from pdserve.control.node_registry import NodeRegistry

logger = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews the lease of one node four times in its length; says once when that stops working, and once when
    it works again. Redis being away is not an error of the node: its channels go on.
    """

    def __init__(self, registry: NodeRegistry, info: NodeInfo) -> None:
        self._registry = registry
        self._info = info
        self._is_registered: bool | None = None

    @property
    def is_registered(self) -> bool:
        """Whether the last renewal succeeded."""
        return self._is_registered is True

    async def run(self) -> None:
        """Register and renew until cancelled; then give the lease back.

        Raises:
            NodeIdTaken: another incarnation keeps renewing the same node id; the lease that a killed
                predecessor left behind is waited out.
        """
        taken_since: float | None = None
        try:
            while True:
                try:
                    await self._registry.renew(self._info)
                    taken_since = None
                    self._note(True, "")
                except RedisUnavailable as error:
                    self._note(False, str(error))
                except NodeIdTaken as error:
                    taken_since = self._outwait(error, taken_since)
                await asyncio.sleep(self._registry.lease_s / 4 * random.uniform(0.9, 1.0))
        finally:
            await self._release()

    def _outwait(self, error: NodeIdTaken, taken_since: float | None) -> float:
        now = time.monotonic()
        if taken_since is None:
            logger.error("cannot register: %s; waiting for its lease to end", error)
            taken_since = now
        self._is_registered = False
        if now - taken_since > 1.5 * self._registry.lease_s:
            raise error
        return taken_since

    def _note(self, is_registered: bool, problem: str) -> None:
        if is_registered == self._is_registered:
            return
        if is_registered:
            logger.info("node %s is registered", self._info.node_id)
        else:
            logger.warning("node %s is degraded, its lease is not renewed: %s", self._info.node_id, problem)
        self._is_registered = is_registered

    async def _release(self) -> None:
        if not self.is_registered:
            return
        try:
            await self._registry.release(self._info)
        except RedisUnavailable as error:
            logger.warning("node %s leaves its lease to run out: %s", self._info.node_id, error)
