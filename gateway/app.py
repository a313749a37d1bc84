"""The gateway's HTTP application."""

import asyncio
import time
from collections.abc import AsyncIterator

from aiohttp import web

from pdserve.engine.sampling_defaults import SamplingDefaults
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.background_responses import BackgroundResponses
from pdserve.gateway.config import HttpConfig
from pdserve.gateway.cors import allow_origin, answer_preflight
from pdserve.gateway.deps import DEPS, Backend, GatewayDeps
from pdserve.gateway.first_failure import first_failure
from pdserve.gateway.generation_endpoints import chat_completions, completions, create_response, messages
from pdserve.gateway.grammar_checker import GrammarChecker
from pdserve.gateway.http_server import check_expectation
from pdserve.gateway.metrics import GatewayMetrics
from pdserve.gateway.middlewares import envelope_errors, label_request, require_api_key, show_request_id
from pdserve.gateway.model_names import list_models, show_model
from pdserve.gateway.open_requests import OpenRequests
from pdserve.gateway.openapi import show_docs, show_openapi
from pdserve.gateway.prompt_encoder import PromptEncoder
from pdserve.gateway.request_cancellation import RequestCancellation
from pdserve.gateway.request_endpoints import cancel_request, show_request
from pdserve.gateway.request_records import AnswerRecords
from pdserve.gateway.responses_endpoints import cancel_response, delete_response, show_input_items, show_response
from pdserve.gateway.service_endpoints import admin_status, live, metrics, ready, show_version
from pdserve.gateway.tokenize_endpoints import (
    count_input_tokens,
    count_tokens,
    detokenize,
    render_chat,
    render_completion,
    tokenize,
)
from pdserve.gateway.tool_parsers import tool_syntax

_RESPONSE = "/v1/responses/{id:(?!input_tokens$)[^/]+}"  # the other is a path of its own, with its own methods
_ROUTES = (
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/responses", create_response),
    ("POST", "/v1/responses/input_tokens", count_input_tokens),
    ("GET", _RESPONSE, show_response),
    ("DELETE", _RESPONSE, delete_response),
    ("POST", "/v1/responses/{id}/cancel", cancel_response),
    ("GET", "/v1/responses/{id}/input_items", show_input_items),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/v1/completions/render", render_completion),
    ("POST", "/v1/chat/completions/render", render_chat),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/v1/requests/{id}", show_request),
    ("DELETE", "/v1/requests/{id}", cancel_request),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:.+}", show_model),
    ("GET", "/health", live),
    ("GET", "/live", live),
    ("GET", "/ping", live),
    ("POST", "/ping", live),
    ("GET", "/ready", ready),
    ("GET", "/version", show_version),
    ("GET", "/metrics", metrics),
    ("GET", "/admin/status", admin_status),
    ("GET", "/openapi.json", show_openapi),
    ("GET", "/docs", show_docs),
)


def create_app(
    config: HttpConfig,
    tokenizer: Tokenizer,
    backend: Backend,
    sampling_defaults: SamplingDefaults,
) -> web.Application:
    """Return the application."""
    app = web.Application(
        client_max_size=config.max_body_bytes,
        middlewares=[label_request, envelope_errors, answer_preflight, require_api_key],
    )
    template = tokenizer.chat_template
    answers = AnswerRecords(backend.records, backend.peers, config.max_choices)
    open_requests = OpenRequests()
    app[DEPS] = GatewayDeps(
        config=config,
        tokenizer=tokenizer,
        source=backend.source,
        status=backend.status,
        answers=answers,
        cancellation=RequestCancellation(backend.peers, answers, open_requests),
        quotas=backend.quotas,
        responses=backend.responses,
        background=BackgroundResponses(backend.responses),
        encoder=PromptEncoder(tokenizer),
        grammars=GrammarChecker(tokenizer),
        metrics=GatewayMetrics(),
        open_requests=open_requests,
        sampling_defaults=sampling_defaults,
        tool_syntax=tool_syntax(config.tool_call_parser, template.source if template is not None else None),
        started_s=time.monotonic(),
    )
    app.on_response_prepare.append(show_request_id)
    app.on_response_prepare.append(allow_origin)
    app.cleanup_ctx.append(_threads)
    app.cleanup_ctx.append(_background)
    app.cleanup_ctx.append(_heard_by_others)
    app.add_routes(
        web.route(method, path, handler, expect_handler=check_expectation) for method, path, handler in _ROUTES
    )
    return app


async def _threads(app: web.Application) -> AsyncIterator[None]:
    yield
    app[DEPS].encoder.close()
    app[DEPS].grammars.close()


async def _background(app: web.Application) -> AsyncIterator[None]:
    async with app[DEPS].background.opened():
        yield


async def _heard_by_others(app: web.Application) -> AsyncIterator[None]:
    async with first_failure(), asyncio.TaskGroup() as group:
        hearing = group.create_task(app[DEPS].cancellation.run(), name="cancellations of other gateways")
        yield
        hearing.cancel()
