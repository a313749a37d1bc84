"""Every reply that is not a success, in OpenAI's envelope: `{"error": {message, type, param, code}}`."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from pdserve.control.errors import RedisUnavailable
from pdserve.engine.errors import InvalidRequest
from pdserve.gateway.errors import AdmissionRefused, GenerationFailed

logger = logging.getLogger(__name__)

_STATUS_OF_FAILURE = {"invalid_request": 400, "timeout": 504, "deadline": 504, "queue_timeout": 503, "cancelled": 499}
_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """One error as the client sees it: in a response of `status`, or as an event of a stream."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the envelope."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {
            "message": self.message,
            "type": _TYPE_OF_STATUS.get(self.status, kind),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self, body: dict[str, Any] | None = None) -> web.Response:
        """Return the HTTP response; `body` is another protocol's envelope."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body() if body is None else body, status=self.status, headers=headers)


class HttpError(Exception):
    """Ends a request with `reply`."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.message)
        self.reply = reply


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return `body` as a JSON response; strict JSON, never NaN."""
    return web.Response(
        body=orjson.dumps(body),
        status=status,
        headers=headers,
        content_type="application/json",
        charset="utf-8",
    )


def error_reply(error: Exception, request_id: str) -> ErrorReply:
    """Return what the client is told about `error`; what nobody expected is logged and told as a 500."""
    match error:
        case HttpError():
            return error.reply
        case InvalidRequest():
            code = "context_length_exceeded" if isinstance(error, ContextLengthExceeded) else None
            return ErrorReply(400, str(error), param=error.field, code=code)
        case AdmissionRefused():
            return ErrorReply(503, error.message, code=error.code, retry_after_s=error.retry_after_s)
        case RedisUnavailable():
            return ErrorReply(503, "what Redis keeps cannot be read now", code="redis_unavailable", retry_after_s=2.0)
        case GenerationFailed():
            status = _STATUS_OF_FAILURE.get(error.code, 503 if error.retryable else 500)
            retry_after_s = 1.0 if status == 503 else None
            return ErrorReply(status, error.message, code=error.code, retry_after_s=retry_after_s)
        case web.HTTPException():
            return _framework_reply(error)
        case _:
            logger.error("request %s failed", request_id, exc_info=error)
            return ErrorReply(500, "the server failed on this request", code="internal_error")


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output together do not fit into the model's context."""


def _framework_reply(error: web.HTTPException) -> ErrorReply:
    match error:
        case web.HTTPRequestEntityTooLarge():
            return ErrorReply(413, "the request body is larger than this server accepts", code="body_too_large")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"this path does not take the method {error.method}; allowed: {allowed}"
            return ErrorReply(405, message, code="method_not_allowed")
        case web.HTTPNotFound():
            return ErrorReply(404, "there is no such path", code="not_found")
        case _:
            return ErrorReply(error.status, error.reason, code=None)
