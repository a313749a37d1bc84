"""Ends requests by the id of their answer, whichever gateway answers them: those of others are told through Redis."""

import asyncio
import logging
from contextlib import suppress
from typing import NoReturn

from pdserve.control.errors import RedisUnavailable
from pdserve.control.gateway_peers import GatewayPeers
from pdserve.control.request_state import RequestStatus
from pdserve.gateway.open_requests import OpenRequests
from pdserve.gateway.request_records import AnswerRecords, status_of_all, unfinished

logger = logging.getLogger(__name__)

_HEAR_S = 0.5
_LOOK_S = 0.1
_WAIT_S = 5.0  # ten times as long as a gateway may take to hear of it


class RequestCancellation:
    """Cancels here and elsewhere; while `run` runs, others can cancel what this gateway answers."""

    def __init__(self, peers: GatewayPeers, answers: AnswerRecords, open_requests: OpenRequests) -> None:
        self._peers = peers
        self._answers = answers
        self._open_requests = open_requests

    async def run(self) -> NoReturn:
        """Say that this gateway lives and end what others ask it to, until cancelled."""
        is_heard = True
        while True:
            try:
                for response_id in await self._peers.hear():
                    self._open_requests.cancel(response_id)
                is_heard = True
            except RedisUnavailable as error:
                if is_heard:
                    logger.warning("what other gateways ask for is not heard: %s", error)
                is_heard = False
            await asyncio.sleep(_HEAR_S)

    async def cancel(self, response_id: str) -> RequestStatus | None:
        """End an answer and return the state that it has reached, None if it is not known. Again is harmless.

        A state that is not terminal is that of one whose gateway was told, and has not ended it in time.

        Raises:
            RedisUnavailable: what others answer cannot be ended now.
        """
        if scopes := self._open_requests.cancel(response_id):
            with suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_S):
                    for scope in scopes:
                        await scope.closed.wait()
                return await self._state_here(response_id)
        return await self._end_elsewhere(response_id)

    async def _state_here(self, response_id: str) -> RequestStatus:
        """Return the state of what has ended here: cancelled, unless its record has another end."""
        with suppress(RedisUnavailable):
            records = await self._answers.of(response_id)
            if records and not unfinished(records):
                return status_of_all(records)
        return RequestStatus.CANCELLED

    async def _end_elsewhere(self, response_id: str) -> RequestStatus | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _WAIT_S
        records = await self._answers.of(response_id)
        while (running := unfinished(records)) and loop.time() < deadline:
            for gateway_id in {record.gateway_id for record in running}:
                await self._peers.tell(gateway_id, response_id)  # again, as a gateway may lose what it was told
            await asyncio.sleep(_LOOK_S)
            records = await self._answers.of(response_id)
        return status_of_all(records) if records else None
