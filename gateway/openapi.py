"""/openapi.json, made of the schema objects that validate, and /docs, a page that shows it without any other server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import orjson
from aiohttp import web
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from pdserve.engine.closed_schema import closed
from pdserve.gateway.docs_page import DOCS_PAGE
from pdserve.gateway.item_pages import DEFAULT_ITEMS, MAX_ITEMS, ORDERS
from pdserve.gateway.messages_format import ANTHROPIC_PATHS
from pdserve.gateway.messages_schema import CountTokensBody, MessagesBody
from pdserve.gateway.other_reply_types import (
    Alive,
    CancelledRequest,
    CountedTokens,
    DeletedResponse,
    Detokenized,
    InputItems,
    MessageReply,
    ModelCard,
    ModelList,
    NamedEvent,
    RenderedPrompts,
    RequestReply,
    ResponseReply,
    StatusReply,
    Tokenized,
    VersionReply,
)
from pdserve.gateway.reply_types import ChatChunk, ChatReply, CompletionChunk, CompletionReply
from pdserve.gateway.responses_schema import InputTokensBody, ResponsesBody
from pdserve.gateway.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_REFERENCE = "#/components/schemas/{model}"
_REASONS = {
    200: "the answer",
    400: "a field is wrong; `param` names it",
    401: "a valid API key is required",
    403: "an admin key is required",
    404: "no such model, request or path",
    408: "the body did not come in time",
    413: "the body is too large",
    415: "the body is not said to be JSON",
    417: "the only expectation that can be met is 100-continue",
    429: "a limit of the API key; Retry-After says when to try again",
    499: "the request was cancelled",
    500: "a defect of the server",
    503: "not now; Retry-After says when to try again",
    504: "the request took longer than the server allows",
}
_BODY_ERRORS = (400, 401, 404, 408, 413, 415, 417, 500)
_GENERATION_ERRORS = (*_BODY_ERRORS, 429, 499, 503, 504)


@dataclass(frozen=True, slots=True)
class Operation:
    """What the document says of one method on one path. `chunk`: the JSON of one event, if the answer may be streamed.

    `reply` is the type of a whole answer in JSON.
    """

    method: str
    path: str
    summary: str
    errors: tuple[int, ...] = ()
    body: type[BaseModel] | None = None
    reply: type[Any] | None = None
    chunk: type[Any] | None = None
    content_type: str = "application/json"
    query: Mapping[str, Any] = field(default_factory=dict)  # the schema of each parameter


_PAGE = {
    "order": {"enum": list(ORDERS), "default": "desc"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS, "default": DEFAULT_ITEMS},
    "after": {"type": "string"},
}
OPERATIONS = (
    Operation(
        "POST",
        "/v1/completions",
        "Continue prompts",
        _GENERATION_ERRORS,
        CompletionBody,
        CompletionReply,
        CompletionChunk,
    ),
    Operation(
        "POST", "/v1/chat/completions", "Answer a conversation", _GENERATION_ERRORS, ChatBody, ChatReply, ChatChunk
    ),
    Operation(
        "POST", "/v1/messages", "Answer, as Anthropic does", _GENERATION_ERRORS, MessagesBody, MessageReply, NamedEvent
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "The length of a prompt",
        (*_BODY_ERRORS, 503),
        CountTokensBody,
        CountedTokens,
    ),
    Operation(
        "POST", "/v1/responses", "Answer, with memory", _GENERATION_ERRORS, ResponsesBody, ResponseReply, NamedEvent
    ),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        "The length of a prompt",
        (*_BODY_ERRORS, 503),
        InputTokensBody,
        CountedTokens,
    ),
    Operation("GET", "/v1/responses/{id}", "A stored response", (400, 401, 404, 503), None, ResponseReply),
    Operation("DELETE", "/v1/responses/{id}", "Forget a response", (401, 404, 503), None, DeletedResponse),
    Operation(
        "POST", "/v1/responses/{id}/cancel", "Cancel a background response", (400, 401, 404, 503), None, ResponseReply
    ),
    Operation(
        "GET",
        "/v1/responses/{id}/input_items",
        "What a response answered",
        (400, 401, 404, 503),
        None,
        InputItems,
        query=_PAGE,
    ),
    Operation(
        "POST", "/v1/completions/render", "The prompts of a body", (*_BODY_ERRORS, 503), CompletionBody, RenderedPrompts
    ),
    Operation(
        "POST", "/v1/chat/completions/render", "The prompt of a body", (*_BODY_ERRORS, 503), ChatBody, RenderedPrompts
    ),
    Operation("POST", "/tokenize", "Text or messages to token ids", _BODY_ERRORS, TokenizeBody, Tokenized),
    Operation("POST", "/detokenize", "Token ids to text", _BODY_ERRORS, DetokenizeBody, Detokenized),
    Operation("GET", "/v1/requests/{id}", "State, route and story of a request", (401, 404, 503), None, RequestReply),
    Operation("DELETE", "/v1/requests/{id}", "Cancel a request", (401, 404, 503), None, CancelledRequest),
    Operation("GET", "/v1/models", "The served models", (401,), None, ModelList),
    Operation("GET", "/v1/models/{name}", "One served model", (401, 404), None, ModelCard),
    Operation("GET", "/health", "The process lives", reply=Alive),
    Operation("GET", "/live", "The process lives", reply=Alive),
    Operation("GET", "/ping", "The process lives", reply=Alive),
    Operation("POST", "/ping", "The process lives", reply=Alive),
    Operation("GET", "/ready", "A token can be produced now", (503,), None, Alive),
    Operation("GET", "/version", "The version", (401,), None, VersionReply),
    Operation("GET", "/metrics", "Counts for Prometheus", content_type="text/plain"),
    Operation("GET", "/admin/status", "Nodes, requests, routes", (401, 403), None, StatusReply),
    Operation("GET", "/openapi.json", "This document"),
    Operation("GET", "/docs", "This document as a page", content_type="text/html"),
)


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of every operation."""
    models = sorted({operation.body for operation in OPERATIONS if operation.body}, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    shown = {shape for operation in OPERATIONS for shape in (operation.reply, operation.chunk) if shape is not None}
    adapters = [(shape.__name__, "serialization", TypeAdapter(shape)) for shape in sorted(shown, key=_name)]
    _, replies = TypeAdapter.json_schemas(adapters, ref_template=_REFERENCE)  # type: ignore[arg-type]  # a list of any adapters
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": version("pdserve")},
        "security": [{}, {"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": {
                **schemas["$defs"],
                **closed(replies)["$defs"],
                "Error": _ERROR,
                "AnthropicError": _ANTHROPIC_ERROR,
            },
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


async def show_openapi(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    return web.Response(body=_DOCUMENT, content_type="application/json", charset="utf-8")


async def show_docs(request: web.Request) -> web.Response:
    """GET /docs."""
    return web.Response(text=DOCS_PAGE, content_type="text/html", charset="utf-8")


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def _name(shape: type[Any]) -> str:
    return shape.__name__


def _operation(operation: Operation) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"} if operation.content_type == "application/json" else {"type": "string"}
    if operation.reply is not None:
        schema = {"$ref": _REFERENCE.format(model=operation.reply.__name__)}
    content: dict[str, Any] = {operation.content_type: {"schema": schema}}
    if operation.chunk is not None:
        event = {"$ref": _REFERENCE.format(model=operation.chunk.__name__)}
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event-data": event}
    responses: dict[str, Any] = {"200": {"description": _REASONS[200], "content": content}}
    model = "AnthropicError" if operation.path.startswith(ANTHROPIC_PATHS) else "Error"
    for status in operation.errors:
        error = {"schema": {"$ref": _REFERENCE.format(model=model)}}
        responses[str(status)] = {"description": _REASONS[status], "content": {"application/json": error}}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.body is not None:
        reference = {"$ref": _REFERENCE.format(model=operation.body.__name__)}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    parameters = [{"name": name, "in": "query", "schema": shape} for name, shape in operation.query.items()]
    if (start := operation.path.find("{")) >= 0:
        name = operation.path[start + 1 : operation.path.index("}")]
        parameters.insert(0, {"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    if parameters:
        described["parameters"] = parameters
    return described


_DOCUMENT = orjson.dumps(openapi_document())
