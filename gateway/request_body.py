"""Bytes of a request body -> a JSON object of the expected shape, or a 400 that names the field."""

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from pdserve.engine.errors import InvalidRequest
from pdserve.gateway.error_responses import ErrorReply, HttpError
from pdserve.gateway.open_requests import ClientGone

Body = TypeVar("Body", bound=BaseModel)

_READ_TIMEOUT_S = 60.0
_WORDING = {"missing": "is required", "too_short": "must not be empty", "string_too_short": "must not be empty"}
_NOT_JSON = ("multipart/", "application/x-www-form-urlencoded", "text/")


async def read_body(request: web.Request, shape: type[Body]) -> Body:
    """Return the body of `request` as `shape`.

    Raises:
        HttpError: it is said to be a form or text, is too large, or is not strict JSON (NaN, bad UTF-8, lone
            surrogates and depth included).
        InvalidRequest: a field is missing or has the wrong type.
    """
    if request.content_type.startswith(_NOT_JSON):
        message = f"the body is declared as {request.content_type}; send application/json"
        raise HttpError(ErrorReply(415, message, code="unsupported_media_type"))
    if (request.content_length or 0) > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size, request.content_length or 0)
    content = _as_utf8(await _read(request), request.charset)
    try:
        fields = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise _bad_json(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _bad_json("the body must be a JSON object")
    return validated(shape, fields)


def validated(shape: type[Body], fields: Mapping[str, Any]) -> Body:
    """Return the body that `fields` are.

    Raises:
        InvalidRequest: a field is missing or has the wrong type.
    """
    try:
        return shape.model_validate(fields)
    except ValidationError as error:
        raise _first_problem(error) from None


async def _read(request: web.Request) -> bytes:
    try:
        if request.content.is_eof():  # all of it came with the headers
            return await request.read()
        async with asyncio.timeout(_READ_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise HttpError(ErrorReply(408, "the request body did not come in time", code="body_timeout")) from None
    except web.RequestPayloadError:
        message = "the body is not encoded as its Content-Encoding or Transfer-Encoding says"
        raise HttpError(ErrorReply(400, message, code="invalid_encoding")) from None
    except ConnectionError as error:
        raise ClientGone from error


def _as_utf8(content: bytes, charset: str | None) -> bytes:
    if charset is None or charset.lower().replace("_", "-") in ("utf-8", "utf8"):
        return content
    try:
        return content.decode(charset).encode("utf-8")
    except (LookupError, UnicodeError):
        raise _bad_json("the body cannot be decoded by the charset that its Content-Type names") from None


def _bad_json(message: str) -> HttpError:
    return HttpError(ErrorReply(400, message, code="invalid_json"))


def _first_problem(error: ValidationError) -> InvalidRequest:
    """Name the field and the expectation; never quote the input."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "body"
    message = _WORDING.get(first["type"], first["msg"])
    return InvalidRequest(field, message[:1].lower() + message[1:])
