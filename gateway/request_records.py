"""The records of the choices of one answer, read together, and the one state that they are in."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pdserve.control.gateway_peers import GatewayPeers
from pdserve.control.request_state import RequestRecord, RequestStatus

_BY_WEIGHT = (  # what the whole is, if any of its choices is
    RequestStatus.FAILED,
    RequestStatus.CANCELLED,
    RequestStatus.QUEUED,
    RequestStatus.PREFILLING,
    RequestStatus.TRANSFERRING,
    RequestStatus.DECODING,
    RequestStatus.FINISHED,
)


class RequestRecords(Protocol):
    """Where the records of requests are kept."""

    async def get(self, request_id: str) -> RequestRecord | None:
        """Return the record, or None.

        Raises:
            RedisUnavailable: nothing can be read now.
        """


def status_of_all(records: Sequence[RequestRecord]) -> RequestStatus:
    """Return the state of the answer whose choices have `records`."""
    statuses = {record.status for record in records}
    return next(status for status in _BY_WEIGHT if status in statuses)


def unfinished(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return those of choices that go on."""
    return [record for record in records if not record.status.is_terminal]


@dataclass(frozen=True, slots=True)
class AnswerRecords:
    """Reads the records of an answer of at most `max_choices` choices."""

    records: RequestRecords
    peers: GatewayPeers
    max_choices: int

    async def of(self, response_id: str) -> list[RequestRecord]:
        """Return the record of each choice, none if it is not known; one whose gateway has gone has failed.

        Raises:
            RedisUnavailable: nothing can be read now.
        """
        records = await self._read(response_id)
        gateway_ids = {record.gateway_id for record in unfinished(records)}
        gone = {gateway_id for gateway_id in gateway_ids if not await self.peers.is_alive(gateway_id)}
        if not gone:
            return records
        again = await self._read(response_id)  # it may have ended between the two looks
        return [_lost(record) if record.gateway_id in gone and unfinished([record]) else record for record in again]

    async def _read(self, response_id: str) -> list[RequestRecord]:
        records: list[RequestRecord] = []
        while len(records) < self.max_choices:
            record = await self.records.get(f"{response_id}-{len(records)}")
            if record is None:
                break
            records.append(record)
        return records


def _lost(record: RequestRecord) -> RequestRecord:
    """Return the record of a request whose gateway has gone: its nodes have dropped it."""
    return replace(record, status=RequestStatus.FAILED, facts=replace(record.facts, error_code="gateway_lost"))
