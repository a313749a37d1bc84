"""Text <-> token ids for clients, as the gateway itself sees them, and the prompt that a request would become."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import web

from pdserve.engine.errors import InvalidRequest
from pdserve.gateway.chat import plan_chat, render_messages
from pdserve.gateway.completions import plan_completion
from pdserve.gateway.deps import DEPS, GatewayDeps
from pdserve.gateway.error_responses import json_response
from pdserve.gateway.generation_plan import GenerationPlan
from pdserve.gateway.messages_plan import count_prompt_tokens
from pdserve.gateway.messages_schema import CountTokensBody
from pdserve.gateway.model_names import check_model
from pdserve.gateway.prompts import template_messages
from pdserve.gateway.request_body import read_body
from pdserve.gateway.responses_plan import num_input_tokens
from pdserve.gateway.responses_schema import InputTokensBody
from pdserve.gateway.sampling_fields import check_token_ids
from pdserve.gateway.schemas import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from pdserve.gateway.unsupported_fields import warning_header

Body = TypeVar("Body", bound=GenerationBody)

_MAX_TOKENS = 2**20  # of one text: seconds of one of the two threads that tokenize


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: the ids of a `prompt`, or of `messages` as the chat template prints them."""
    deps = request.app[DEPS]
    body = await read_body(request, TokenizeBody)
    headers = warning_header(body.model_extra or {}, deps.config)
    if body.model is not None:
        check_model(body.model, deps.config)
    token_ids = await _token_ids(body, deps)
    reply: dict[str, Any] = {"count": len(token_ids), "max_model_len": deps.max_model_len(), "tokens": list(token_ids)}
    if body.return_token_strs:
        reply["token_strs"] = [deps.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in token_ids]
    return json_response(reply, headers=headers)


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of token ids, special tokens included."""
    deps = request.app[DEPS]
    body = await read_body(request, DetokenizeBody)
    headers = warning_header(body.model_extra or {}, deps.config)
    if body.model is not None:
        check_model(body.model, deps.config)
    check_token_ids(body.tokens, deps.tokenizer.vocab_size, "tokens")
    return json_response({"prompt": deps.tokenizer.decode(body.tokens, skip_special_tokens=False)}, headers=headers)


async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens."""
    deps = request.app[DEPS]
    body = await read_body(request, CountTokensBody)
    headers = warning_header(body.model_extra or {}, deps.config)
    return json_response({"input_tokens": await count_prompt_tokens(body, deps)}, headers=headers)


async def count_input_tokens(request: web.Request) -> web.Response:
    """POST /v1/responses/input_tokens."""
    deps = request.app[DEPS]
    body = await read_body(request, InputTokensBody)
    headers = warning_header(body.model_extra or {}, deps.config)
    counted = {"object": "response.input_tokens", "input_tokens": await num_input_tokens(body, deps)}
    return json_response(counted, headers=headers)


async def render_completion(request: web.Request) -> web.Response:
    """POST /v1/completions/render: the prompts that this body would be computed from; nothing is generated."""
    return await _render(request, CompletionBody, plan_completion)


async def render_chat(request: web.Request) -> web.Response:
    """POST /v1/chat/completions/render: the prompt that this body would be computed from; nothing is generated."""
    return await _render(request, ChatBody, plan_chat)


async def _token_ids(body: TokenizeBody, deps: GatewayDeps) -> tuple[int, ...]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt", "give either prompt or messages")
    if body.prompt is not None:
        adds = body.add_special_tokens is not False
        return await deps.encoder.encode(body.prompt, "prompt", _MAX_TOKENS, add_special_tokens=adds)
    assert body.messages is not None
    text = render_messages(template_messages(body.messages), body, deps, body.tools or ())
    return await deps.encoder.encode(text, "messages", _MAX_TOKENS, add_special_tokens=bool(body.add_special_tokens))


async def _render(
    request: web.Request, shape: type[Body], plan_of: Callable[[Body, GatewayDeps], Awaitable[GenerationPlan]]
) -> web.Response:
    deps = request.app[DEPS]
    body = await read_body(request, shape)
    headers = warning_header(body.model_extra or {}, deps.config)
    plan = await plan_of(body, deps)
    prompts = [
        {
            "prompt": deps.tokenizer.decode(token_ids, skip_special_tokens=False) if text is None else text,
            "prompt_token_ids": list(token_ids),
            "max_tokens": max_tokens,
        }
        for token_ids, text, max_tokens in zip(plan.prompts, plan.prompt_texts, plan.max_tokens, strict=True)
    ]
    return json_response({"object": "prompt.list", "model": plan.model, "data": prompts}, headers=headers)
