"""Keeps what schemathesis asks for affordable: long answers are cut short, everything else stays as it was made up."""

from typing import Any

import schemathesis

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_MANY = ("n", "best_of")
_MAX_MODEL_CHARS = 512  # a longer name is to be refused
_ANSWERABLE = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "input": "Hi"}


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Return a body whose valid answers are a few tokens long; values that are to be refused stay."""
    if not isinstance(body, dict):
        return body
    if not any(type(body.get(name)) is int for name in _LIMITS):
        body.setdefault("max_output_tokens" if "input" in body else "max_tokens", 2)
        for name in _LIMITS:
            if name in body and body[name] is None:
                body[name] = 2
    for name in _LIMITS:
        if type(body.get(name)) is int and 2 < body[name] < 10_000:
            body[name] = 2
    for name in _MANY:
        if type(body.get(name)) is int and 2 < body[name] <= 128:
            body[name] = 2
    if len(body) % 2:  # the other half keeps prompts that are made up, of which hardly any can be answered
        body |= {name: content for name, content in _ANSWERABLE.items() if name in body and _is_taken(name, body[name])}
    if type(body.get("model")) is str and 0 < len(body["model"]) <= _MAX_MODEL_CHARS:
        body["model"] = MODEL
    return body


def _is_taken(name: str, value: Any) -> bool:
    """Whether the schema has nothing against `value`; what it refuses stays, to be refused."""
    is_list = isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
    return is_list or name != "messages"


MODEL = "smollm2-135m-instruct"
