"""POST /v1/completions: its body -> a plan."""

import time
import uuid
from dataclasses import replace

from pdserve.engine.errors import InvalidRequest
from pdserve.engine.sampling_params import MAX_BRANCHES
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
from pdserve.gateway.model_names import check_model
from pdserve.gateway.prompts import Prompt, parse_prompts
from pdserve.gateway.sampling_fields import check_token_ids, sampling_params
from pdserve.gateway.schemas import CompletionBody
from pdserve.gateway.structured_fields import asked_form

_DEFAULT_MAX_TOKENS = 16


async def plan_completion(body: CompletionBody, deps: GatewayDeps) -> GenerationPlan:
    """Validate `body` in the documented order (shape, model, tokens) and tokenize its prompts."""
    prompts = parse_prompts(body.prompt, deps.config.max_choices)
    n = num_choices(body, len(prompts), deps.config.max_choices)
    num_branches = _num_branches(body, n, len(prompts), deps.config.max_choices)
    form = asked_form(body)
    sampling = sampling_params(
        body, deps, form, max_tokens=body.max_tokens, logprobs=body.logprobs, prompt_logprobs=_prompt_logprobs(body)
    )
    check_model(body.model, deps.config)
    await deps.grammars.check(form)
    max_model_len = deps.required_max_model_len()
    token_ids = [await _encode(prompt, body, deps, max_model_len) for prompt in prompts]
    limits = output_limits(token_ids, sampling, max_model_len, "prompt")
    asked_by = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    check_prompt_logprobs(token_ids, num_branches, sampling.prompt_logprobs, asked_by)
    if body.max_tokens is None:
        least = max(_DEFAULT_MAX_TOKENS, sampling.min_tokens)
        limits = tuple(min(limit, least) for limit in limits)
    return GenerationPlan(
        endpoint=Endpoint.COMPLETIONS,
        response_id=f"cmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=body.model,
        prompts=tuple(token_ids),
        num_choices=num_branches,
        num_kept=n if num_branches > n else None,
        sampling=sampling,
        max_tokens=limits,
        cache_salt=body.cache_salt or "",
        timeout_s=deps.config.request_timeout_s,
        reply=replace(ReplyOptions.of(body), echo=bool(body.echo)),
        prompt_texts=tuple(_text_as_given(prompt, body) for prompt in prompts),
    )


def _num_branches(body: CompletionBody, n: int, num_prompts: int, max_choices: int) -> int:
    """Return how many choices are generated for each prompt, so that the best n can be shown."""
    best_of = n if body.best_of is None else body.best_of
    if not n <= best_of <= MAX_BRANCHES:
        raise InvalidRequest("best_of", f"must be between n, which is {n}, and {MAX_BRANCHES}")
    if best_of * num_prompts > max_choices:
        raise InvalidRequest("best_of", f"prompts times best_of must be at most {max_choices}")
    if best_of > n and body.stream:
        raise InvalidRequest("best_of", f"must be n, which is {n}, in a stream: choices are ranked when all have ended")
    return best_of


def _prompt_logprobs(body: CompletionBody) -> int | None:
    """Return how many alternatives are wanted for each prompt token; a prompt without an answer is always scored."""
    if not body.echo or (body.logprobs is None and body.max_tokens != 0):
        return body.prompt_logprobs
    return max(body.logprobs or 0, body.prompt_logprobs or 0)


def _text_as_given(prompt: Prompt, body: CompletionBody) -> str | None:
    """Return the text of a prompt that is computed as it was written; a cut one is shown by its tokens."""
    return prompt if isinstance(prompt, str) and body.truncate_prompt_tokens is None else None


async def _encode(prompt: Prompt, body: CompletionBody, deps: GatewayDeps, max_model_len: int) -> tuple[int, ...]:
    kept = prompt_limit(body, max_model_len, body.max_tokens, _DEFAULT_MAX_TOKENS)
    if isinstance(prompt, list):
        prompt = prompt if kept is None else prompt[-kept:]
        if len(prompt) <= max_model_len:  # a longer one is refused for its length
            check_token_ids(prompt, deps.tokenizer.vocab_size, "prompt")
        return tuple(prompt)
    adds_special_tokens = body.add_special_tokens is not False
    token_ids = await deps.encoder.encode(prompt, "prompt", max_model_len, adds_special_tokens, kept)
    if not token_ids:
        raise InvalidRequest("prompt", "must not be empty: this model has no token to begin with")
    return token_ids
