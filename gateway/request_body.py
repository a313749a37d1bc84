"""Bytes of a request body -> a JSON object of the expected shape, or a 400 that names the field."""

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from aiohttp import hdrs, web
from pydantic import BaseModel, ValidationError

from pdserve.engine.errors import InvalidRequest
from pdserve.gateway.content_coding import TAKEN, BodyTooLarge, BrokenCoding, UnknownCoding, decoded
from pdserve.gateway.deps import DEPS
from pdserve.gateway.error_responses import ErrorReply, HttpError
from pdserve.gateway.open_requests import ClientGone

Body = TypeVar("Body", bound=BaseModel)

_WORDING = {"missing": "is required", "too_short": "must not be empty", "string_too_short": "must not be empty"}
_JSON = ("application/json", "text/json", "application/octet-stream")  # the last says nothing, as no declaration does


async def read_body(request: web.Request, shape: type[Body]) -> Body:
    """Return the body of `request` as `shape`.

    Raises:
        HttpError: it is said to be something else, is too large, or is not strict JSON (NaN, bad UTF-8, lone
            surrogates and depth included).
        InvalidRequest: a field is missing or has the wrong type.
    """
    if not _is_json(request.content_type):
        message = f"the body is declared as {request.content_type}; send application/json"
        raise HttpError(ErrorReply(415, message, code="unsupported_media_type"))
    if (request.content_length or 0) > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size, request.content_length or 0)
    content = _as_utf8(await _decoded(await _read(request), request), request.charset)
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


def _is_json(content_type: str) -> bool:
    return content_type in _JSON or content_type.endswith("+json")


async def _decoded(content: bytes, request: web.Request) -> bytes:
    try:
        named = ",".join(request.headers.getall(hdrs.CONTENT_ENCODING, ()))
        return await decoded(content, named, request.client_max_size)
    except UnknownCoding:
        taken = ", ".join(TAKEN)
        message = f"the body has a Content-Encoding that this server does not take; {taken} and none it does"
        reply = ErrorReply(415, message, code="unsupported_encoding", headers={hdrs.ACCEPT_ENCODING: taken})
        raise HttpError(reply) from None
    except BrokenCoding:
        raise _bad_encoding() from None
    except BodyTooLarge:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size) from None


async def _read(request: web.Request) -> bytes:
    try:
        if request.content.is_eof():  # all of it came with the headers
            return await request.read()
        async with asyncio.timeout(request.app[DEPS].config.read_timeout_s):
            return await request.read()
    except TimeoutError:
        raise HttpError(ErrorReply(408, "the request body did not come in time", code="body_timeout")) from None
    except web.RequestPayloadError:
        raise _bad_encoding() from None
    except ConnectionError as error:
        raise ClientGone from error


def _as_utf8(content: bytes, charset: str | None) -> bytes:
    if charset is None or charset.lower().replace("_", "-") in ("utf-8", "utf8"):
        return content
    try:
        return content.decode(charset).encode("utf-8")
    except (LookupError, UnicodeError):
        raise _bad_json("the body cannot be decoded by the charset that its Content-Type names") from None


def _bad_encoding() -> HttpError:
    message = "the body is not encoded as its Content-Encoding or Transfer-Encoding says"
    return HttpError(ErrorReply(400, message, code="invalid_encoding"))


def _bad_json(message: str) -> HttpError:
    return HttpError(ErrorReply(400, message, code="invalid_json"))


def _first_problem(error: ValidationError) -> InvalidRequest:
    """Name the field and the expectation; never quote the input."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "body"
    message = _WORDING.get(first["type"], first["msg"])
    return InvalidRequest(field, message[:1].lower() + message[1:])
