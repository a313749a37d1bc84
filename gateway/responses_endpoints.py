"""What can be done with a stored response: fetch it, see its input, cancel it, forget it."""

import re
from contextlib import suppress
from typing import Any

from aiohttp import web

from pdserve.control.errors import RedisUnavailable
from pdserve.control.response_store import StoredResponse
from pdserve.gateway.deps import DEPS, GatewayDeps
from pdserve.gateway.error_responses import ErrorReply, HttpError, json_response
from pdserve.gateway.item_pages import ItemPage

_ID = re.compile(r"resp_[0-9a-f]{32}")
_RUNNING = ("queued", "in_progress")


async def show_response(request: web.Request) -> web.Response:
    """GET /v1/responses/{id}."""
    if request.query.get("stream") in ("true", "1"):
        message = "a stored response is fetched whole; leave stream out"
        raise HttpError(ErrorReply(400, message, "stream", "unsupported_value"))
    stored = await _stored(request)
    return json_response(await _as_it_is(stored, request.app[DEPS]))


async def show_input_items(request: web.Request) -> web.Response:
    """GET /v1/responses/{id}/input_items: the conversation that was answered, a page of it."""
    page = ItemPage.of(request.query)
    stored = await _stored(request)
    num_answers = 1 if stored.response["output"] else 0
    messages = stored.messages[: len(stored.messages) - num_answers]
    response_id = stored.response["id"]
    stem = f"msg_{response_id.removeprefix('resp_')}"
    shown = [item for message in messages for item in _items(message)]
    items = [{"id": f"{stem}_{index}", "status": "completed", **item} for index, item in enumerate(shown)]
    return json_response(page.cut(items))


async def cancel_response(request: web.Request) -> web.Response:
    """POST /v1/responses/{id}/cancel: end a background response, whichever gateway generates it. Again is harmless."""
    deps = request.app[DEPS]
    stored = await _stored(request)
    if not stored.response["background"]:
        message = "only a response that was created with background can be cancelled"
        raise HttpError(ErrorReply(400, message, "background", "not_cancellable"))
    if stored.response["status"] in _RUNNING:
        cancelled = StoredResponse({**stored.response, "status": "cancelled"}, [])
        if await deps.responses.cancel(stored.response["id"], cancelled):
            await _stop(stored.response["id"], deps)
            return json_response(cancelled.response)
        stored = await _stored(request)  # it has just ended, or was deleted
    return json_response(await _as_it_is(stored, deps))


async def delete_response(request: web.Request) -> web.Response:
    """DELETE /v1/responses/{id}; one that is still generated is cancelled."""
    stored = await _stored(request)
    response_id = stored.response["id"]
    await request.app[DEPS].responses.delete(response_id)
    if stored.response["status"] in _RUNNING:
        await _stop(response_id, request.app[DEPS])
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def _stop(response_id: str, deps: GatewayDeps) -> None:
    """Have its work end now, so that its record says so too; in the store its end is written already."""
    with suppress(RedisUnavailable):
        await deps.cancellation.cancel(response_id)


async def _stored(request: web.Request) -> StoredResponse:
    response_id = request.match_info["id"]
    stored = await request.app[DEPS].responses.get(response_id) if _ID.fullmatch(response_id) else None
    if stored is None:
        message = "there is no such response: it was not stored, or it was kept long enough"
        raise HttpError(ErrorReply(404, message, code="response_not_found"))
    return stored


async def _as_it_is(stored: StoredResponse, deps: GatewayDeps) -> dict[str, Any]:
    """Return the response; one that runs on no gateway any more has failed."""
    response = stored.response
    if response["status"] not in _RUNNING or await deps.responses.has_owner(response["id"]):
        return response
    again = await deps.responses.get(response["id"])
    if again is not None and again.response["status"] not in _RUNNING:
        return again.response  # it ended between the two looks
    error = {"code": "gateway_lost", "message": "the gateway that generated it has gone"}
    return {**response, "status": "failed", "error": error}


def _items(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the items that a message of the chat was made of, without ids."""
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    calls = [
        {"type": "function_call", "call_id": call["id"], **call["function"]} for call in message.get("tool_calls", ())
    ]
    if calls and not message["content"]:
        return calls
    kind = "output_text" if message["role"] == "assistant" else "input_text"
    part: dict[str, Any] = {"type": kind, "text": message["content"] or ""}
    if kind == "output_text":
        part["annotations"] = []
    return [{"type": "message", "role": message["role"], "content": [part]}, *calls]
