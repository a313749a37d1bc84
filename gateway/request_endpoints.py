"""One request from the outside: where it is, how it went, and how to end it. Its id is the capability."""

import re

from aiohttp import web

from pdserve.control.request_state import RequestRecord, RequestStatus
from pdserve.gateway.deps import DEPS
from pdserve.gateway.error_responses import ErrorReply, HttpError, json_response
from pdserve.gateway.other_reply_types import RequestChoice
from pdserve.gateway.request_records import status_of_all

_ID = re.compile(r"[a-z]{1,16}[-_][0-9a-f]{32}")


async def show_request(request: web.Request) -> web.Response:
    """GET /v1/requests/{id}: the record of each choice, as Redis has it."""
    deps = request.app[DEPS]
    response_id = _response_id(request)
    records = await deps.answers.of(response_id)
    if not records:
        raise _unknown()
    return json_response(
        {
            "id": response_id,
            "object": "request",
            "status": status_of_all(records),
            "choices": [_choice(index, record) for index, record in enumerate(records)],
        }
    )


async def cancel_request(request: web.Request) -> web.Response:
    """DELETE /v1/requests/{id}: end it, whichever gateway answers it; who waits for it is told. Again is harmless."""
    response_id = _response_id(request)
    status = await request.app[DEPS].cancellation.cancel(response_id)
    if status is None:
        raise _unknown()
    if not status.is_terminal:
        message = f"the gateway that answers this request was told to end it, and has not yet: it is {status}"
        raise HttpError(ErrorReply(503, message, code="gateway_silent", retry_after_s=1.0))
    is_cancelled = status is RequestStatus.CANCELLED
    return json_response({"id": response_id, "object": "request", "cancelled": is_cancelled, "status": status})


def _response_id(request: web.Request) -> str:
    response_id = request.match_info["id"]
    if not _ID.fullmatch(response_id):
        raise _unknown()
    return response_id


def _unknown() -> HttpError:
    message = "no such request is known: it never was, or it ended a while ago"
    return HttpError(ErrorReply(404, message, code="request_not_found"))


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
