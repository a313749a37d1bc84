"""The sampling fields of a body -> checked SamplingParams, with the model's recommendations where it says nothing."""

from collections.abc import Sequence
from typing import Any

from pdserve.engine.bad_words import bad_words_ids
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.sampling_params import SamplingParams
from pdserve.gateway.deps import GatewayDeps
from pdserve.gateway.schemas import ChatBody, GenerationBody
from pdserve.gateway.structured_fields import AskedForm

_MAX_STOP_CHARS = 1024
_MAX_STOP_TOKEN_IDS = 256
_MAX_ID_DIGITS = 10


def sampling_params(body: GenerationBody, deps: GatewayDeps, form: AskedForm | None, **fields: Any) -> SamplingParams:
    """Return the sampling that `body` asks for; `fields` are those that the endpoints name differently.

    The answer's `form` is checked for its shape only: `deps.grammars` compiles it.
    """
    vocab_size = deps.tokenizer.vocab_size
    given = {
        "min_tokens": body.min_tokens,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "seed": body.seed,
        "stop_token_ids": _stop_token_ids(body.stop_token_ids, vocab_size),
        "ignore_eos": body.ignore_eos,
        "speculative": body.speculative,
        "structured_outputs": None if form is None else form.params,
        "priority": _priority(body.priority, deps),
        "stop": _stop_strings(body.stop),
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": _logit_bias(body.logit_bias, vocab_size),
        "allowed_token_ids": _allowed_token_ids(body.allowed_token_ids, vocab_size),
        "bad_words_ids": None if body.bad_words is None else bad_words_ids(body.bad_words, deps.tokenizer),
        **fields,
    }
    asked = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingParams(**{"max_tokens": None, **deps.sampling_defaults.values(), **asked})
    except InvalidRequest as error:
        raise InvalidRequest(_given_name(error.field, body), error.message) from None


def _given_name(field: str, body: GenerationBody) -> str:
    """Return `field` as the client called it: a chat has two names for its limit."""
    has_newer_name = isinstance(body, ChatBody) and body.max_completion_tokens is not None
    return "max_completion_tokens" if field == "max_tokens" and has_newer_name else field


def _priority(priority: int | None, deps: GatewayDeps) -> int | None:
    if priority and not deps.config.has_priorities:
        raise InvalidRequest("priority", "must be 0 here: the scheduling policy is fcfs, not priority")
    return priority


def check_token_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Refuse ids that the tokenizer does not know."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(field, f"token ids must be between 0 and {vocab_size - 1}, got {token_id}")


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    """Return `bias` by token id. The keys of a JSON object are strings; these must be plain decimal numbers."""
    if bias is None:
        return None
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS):
            raise InvalidRequest("logit_bias", "each key must be a token id in decimal digits")
        token_id = int(key)
        check_token_ids([token_id], vocab_size, "logit_bias")
        if token_id in by_id:
            raise InvalidRequest("logit_bias", f"token id {token_id} is given twice")
        by_id[token_id] = value
    return by_id


def _allowed_token_ids(token_ids: list[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if token_ids is None:
        return None
    check_token_ids(token_ids, vocab_size, "allowed_token_ids")
    return tuple(dict.fromkeys(token_ids))


def _stop_token_ids(token_ids: list[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if token_ids is None:
        return None
    if len(token_ids) > _MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stop_token_ids", f"at most {_MAX_STOP_TOKEN_IDS} ids, got {len(token_ids)}")
    check_token_ids(token_ids, vocab_size, "stop_token_ids")
    return tuple(token_ids)


def _stop_strings(stop: object) -> tuple[str, ...] | None:
    if stop is None:
        return None
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise InvalidRequest("stop", "must be a string or a list of strings")
    if any(len(text) > _MAX_STOP_CHARS for text in stops):
        raise InvalidRequest("stop", f"each stop string may have at most {_MAX_STOP_CHARS} characters")
    return tuple(stops)
