"""One request from the outside: where it is, how it went, and how to end it. Its id is the capability."""

import re

from aiohttp import web

from pdserve.control.request_state import RequestRecord, RequestStatus
from pdserve.gateway.deps import DEPS, GatewayDeps
from pdserve.gateway.error_responses import ErrorReply, HttpError, json_response
from pdserve.gateway.other_reply_types import RequestChoice

_ID = re.compile(r"[a-z]{1,16}[-_][0-9a-f]{32}")
_BY_WEIGHT = (  # what the whole is, if any of its choices is
    RequestStatus.FAILED,
    RequestStatus.CANCELLED,
    RequestStatus.QUEUED,
    RequestStatus.PREFILLING,
    RequestStatus.TRANSFERRING,
    RequestStatus.DECODING,
    RequestStatus.FINISHED,
)


async def show_request(request: web.Request) -> web.Response:
    """GET /v1/requests/{id}: the record of each choice, as Redis has it."""
    deps = request.app[DEPS]
    response_id = _response_id(request)
    records = await _records(response_id, deps)
    if not records:
        raise _unknown()
    statuses = {record.status for record in records}
    return json_response(
        {
            "id": response_id,
            "object": "request",
            "status": next(status for status in _BY_WEIGHT if status in statuses),
            "choices": [_choice(index, record) for index, record in enumerate(records)],
        }
    )


async def cancel_request(request: web.Request) -> web.Response:
    """DELETE /v1/requests/{id}: end it now; who waits for it is told. Again is harmless."""
    deps = request.app[DEPS]
    response_id = _response_id(request)
    if deps.open_requests.cancel(response_id):
        return json_response({"id": response_id, "object": "request", "cancelled": True})
    records = await _records(response_id, deps)
    if not records:
        raise _unknown()
    if all(record.status.is_terminal for record in records):
        return json_response({"id": response_id, "object": "request", "cancelled": False})
    message = f"this request is answered by {records[0].gateway_id}; cancel it there"
    raise HttpError(ErrorReply(409, message, code="other_gateway"))


def _response_id(request: web.Request) -> str:
    response_id = request.match_info["id"]
    if not _ID.fullmatch(response_id):
        raise _unknown()
    return response_id


def _unknown() -> HttpError:
    message = "no such request is known: it never was, or it ended a while ago"
    return HttpError(ErrorReply(404, message, code="request_not_found"))


async def _records(response_id: str, deps: GatewayDeps) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    while len(records) < deps.config.max_choices:
        record = await deps.records.get(f"{response_id}-{len(records)}")
        if record is None:
            break
        records.append(record)
    return records


def _choice(index: int, record: RequestRecord) -> RequestChoice:
    facts = record.facts
    return {
        "index": index,
        "status": record.status,
        "gateway_id": record.gateway_id,
        "route": facts.route,
        "prefill_node_id": facts.prefill_node_id,
        "decode_node_id": facts.decode_node_id,
        "num_attempts": facts.num_attempts,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_output_tokens": facts.num_output_tokens,
        "finish_reason": facts.finish_reason,
        "error_code": facts.error_code,
        "created_ms": record.created_ms,
        "updated_ms": record.updated_ms,
        "story": [{"at_ms": entry.at_ms, "status": entry.status, "note": entry.note} for entry in record.story],
    }
