"""POST /v1/chat/completions: its body -> a plan."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pdserve.engine.errors import InvalidRequest
from pdserve.engine.sampling_params import MAX_LOGPROBS
from pdserve.gateway.answer_reader import AnswerReading, FreeCalls
from pdserve.gateway.deps import GatewayDeps
from pdserve.gateway.generation_plan import (
    Endpoint,
    GenerationPlan,
    ReplyOptions,
    check_prompt_logprobs,
    num_choices,
    output_limits,
    prompt_limit,
)
from pdserve.gateway.mistral_calls import MistralSyntax
from pdserve.gateway.model_names import check_model
from pdserve.gateway.prompts import template_messages
from pdserve.gateway.sampling_fields import sampling_params
from pdserve.gateway.schemas import ChatBody, TokenizeBody
from pdserve.gateway.structured_fields import AskedForm, asked_form, behind_thoughts
from pdserve.gateway.think_reader import CLOSING_TAG, OPENING_TAG
from pdserve.gateway.tool_fields import AskedCalls, asked_calls
from pdserve.gateway.tool_parsers import ReasoningParser


async def plan_chat(body: ChatBody, deps: GatewayDeps) -> GenerationPlan:
    """Validate `body` in the documented order (shape, model, tokens), render its messages and tokenize them.

    `max_completion_tokens` wins over `max_tokens`; without either the answer may fill the context.
    """
    messages = template_messages(body.messages)
    n = num_choices(body, 1, deps.config.max_choices)
    if body.max_completion_tokens is not None and body.max_completion_tokens < 1:
        raise InvalidRequest("max_completion_tokens", "must be at least 1")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    asked = asked_calls(body, deps.tool_syntax)
    form = _only_form(asked_form(body), asked)
    check_model(body.model, deps.config)
    text = render_messages(messages, body, deps, asked.tools)
    reading = _reading(asked, text, deps)
    if form is not None and reading.has_thoughts:
        form = behind_thoughts(form, reading.is_thought_open)
    sampling = sampling_params(
        body,
        deps,
        form,
        max_tokens=max_tokens,
        logprobs=_num_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
    )
    await deps.grammars.check(form)
    max_model_len = deps.required_max_model_len()
    kept = prompt_limit(body, max_model_len, max_tokens)
    prompt = await deps.encoder.encode(text, "messages", max_model_len, bool(body.add_special_tokens), kept)
    if not prompt:
        raise InvalidRequest("messages", "the chat template makes an empty prompt of them")
    check_prompt_logprobs((prompt,), n, sampling.prompt_logprobs, "prompt_logprobs")
    return GenerationPlan(
        endpoint=Endpoint.CHAT,
        response_id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=body.model,
        prompts=(prompt,),
        num_choices=n,
        sampling=sampling,
        max_tokens=output_limits((prompt,), sampling, max_model_len, "messages"),
        cache_salt=body.cache_salt or "",
        timeout_s=deps.config.request_timeout_s,
        reply=_reply(body, reading, deps),
        prompt_texts=(text,),
        reading=reading,
    )


def _only_form(form: AskedForm | None, asked: AskedCalls) -> AskedForm | None:
    if form is not None and asked.form is not None:
        raise InvalidRequest(form.field.split(".")[0], "cannot be combined with a tool that must be called")
    return form or asked.form


def _reading(asked: AskedCalls, prompt: str, deps: GatewayDeps) -> AnswerReading:
    return AnswerReading(
        calls=asked.calls,
        is_only_first=asked.is_only_first,
        has_thoughts=deps.config.reasoning_parser is ReasoningParser.THINK,
        is_thought_open=prompt.rstrip().endswith(OPENING_TAG),
        has_short_call_ids=isinstance(deps.tool_syntax, MistralSyntax),
    )


def _reply(body: ChatBody, reading: AnswerReading, deps: GatewayDeps) -> ReplyOptions:
    """Return what `body` asks for, with special tokens where one of them says what begins or ends."""
    reply = ReplyOptions.of(body)
    marks = [*(reading.calls.syntax.markers if isinstance(reading.calls, FreeCalls) else ())]
    marks += [CLOSING_TAG] if reading.has_thoughts else []
    return replace(reply, skip_special_tokens=False) if any(map(deps.tokenizer.is_special_text, marks)) else reply


def render_messages(
    messages: list[dict[str, Any]],
    body: ChatBody | TokenizeBody,
    deps: GatewayDeps,
    tools: Sequence[dict[str, Any]] = (),
) -> str:
    """Return the prompt text that the chat template makes of `messages` and `tools`, with the options of `body`.

    The role `developer` is `system` to a template that does not know it.
    """
    continues = bool(body.continue_final_message)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    template = deps.tokenizer.chat_template
    if template is None or "developer" not in template.source:
        messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
    return deps.tokenizer.render_chat(
        messages,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        tools=tools,
        variables=variables,
    )


def _num_logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequest("top_logprobs", f"must be between 0 and {MAX_LOGPROBS}")
    if body.logprobs:
        return top or 0
    if top:
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    return None
