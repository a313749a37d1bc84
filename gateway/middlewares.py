"""Around every handler: the request id, the API key, and the error envelope."""

import logging
import re
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from pdserve.gateway.deps import CALLER, DEPS, REQUEST_ID
from pdserve.gateway.error_responses import ErrorReply, HttpError, error_reply
from pdserve.gateway.messages_format import ANTHROPIC_PATHS, anthropic_error
from pdserve.gateway.schemas import REQUEST_ID_PATTERN

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_ADMIN_PATHS = "/admin/"
_OPEN_PATHS = frozenset({"/health", "/live", "/ping", "/ready", "/metrics", "/openapi.json", "/docs"})
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)


@web.middleware
async def label_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Take the client's request id if it is short and plain, else make one. It is a label, never a key."""
    given = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return await handler(request)


async def show_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Put the request id on every response, streams and errors included, and count the response."""
    if (request_id := request.get(REQUEST_ID)) is not None:
        response.headers["X-Request-Id"] = request_id
        if request.path.startswith(ANTHROPIC_PATHS):
            response.headers["request-id"] = request_id  # where Anthropic's clients look for it
    request.app[DEPS].metrics.responded(response.status)


@web.middleware
async def envelope_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler, or aiohttp itself, raises into the error envelope that the path's clients read."""
    try:
        return await handler(request)
    except Exception as error:
        reply = error_reply(error, request[REQUEST_ID])
        response = reply.response(anthropic_error(reply) if request.path.startswith(ANTHROPIC_PATHS) else None)
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        return response


@web.middleware
async def require_api_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a request without one of the configured keys, before anything of its body is looked at."""
    config = request.app[DEPS].config
    is_admin = bool(config.admin_keys) and request.path.startswith(_ADMIN_PATHS)
    keys = config.admin_keys if is_admin else config.api_keys
    caller = None
    if keys and request.path not in _OPEN_PATHS:
        caller = keys.find(_presented_key(request))
        if caller is None:
            raise HttpError(_key_required(is_admin and config.api_keys.find(_presented_key(request)) is not None))
    request[CALLER] = caller
    return await handler(request)


def _presented_key(request: web.Request) -> bytes:
    if (own := request.headers.get("x-api-key")) is not None:  # Anthropic's clients
        return own.strip().encode("utf-8", "surrogateescape")
    scheme, _, given = request.headers.get("Authorization", "").strip().partition(" ")
    return given.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""


def _key_required(is_known_elsewhere: bool) -> ErrorReply:
    if is_known_elsewhere:
        return ErrorReply(403, "this API key does not open /admin; use an admin key", code="admin_key_required")
    return ErrorReply(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")
