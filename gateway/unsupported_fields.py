"""Fields that other servers understand and this one does not.

One that would change the answer is refused unless its value is neutral; one that cannot is ignored in
silence; a name that nobody knows is ignored and reported in a header, so that a typing error shows.
"""

import re
from collections.abc import Callable, Mapping

from pdserve.engine.errors import InvalidRequest
from pdserve.gateway.config import HttpConfig

_HARMLESS = frozenset(
    {
        "guided_decoding_backend",
        "parallel_tool_calls",
        "verbosity",
    }
)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_REPORTED = 8


def _is_empty(value: object) -> bool:
    return value is None or value is False or value in ([], {}, "")


def _is_one(value: object) -> bool:
    return value is None or (not isinstance(value, bool) and value == 1)


def _is_free_tool_choice(value: object) -> bool:
    return value in (None, "none", "auto")


def _is_text_only(value: object) -> bool:
    return value in (None, [], ["text"])


_IS_NEUTRAL: Mapping[str, Callable[[object], bool]] = {
    "audio": _is_empty,
    "best_of": _is_one,
    "chat_template": _is_empty,
    "container": _is_empty,
    "context_management": _is_empty,
    "conversation": _is_empty,
    "documents": _is_empty,
    "echo": _is_empty,
    "function_call": _is_free_tool_choice,
    "functions": _is_empty,
    "guided_whitespace_pattern": _is_empty,
    "length_penalty": _is_one,
    "logits_processors": _is_empty,
    "mcp_servers": _is_empty,
    "modalities": _is_text_only,
    "prediction": _is_empty,
    "prompt": _is_empty,
    "prompt_embeds": _is_empty,
    "return_tokens_as_token_ids": _is_empty,
    "suffix": _is_empty,
    "tool_choice": _is_free_tool_choice,
    "tools": _is_empty,
    "use_beam_search": _is_empty,
    "web_search_options": _is_empty,
}


def warning_header(extra: Mapping[str, object], config: HttpConfig) -> dict[str, str]:
    """Return the header that reports the names in `extra` that nobody knows; empty without one.

    Raises:
        InvalidRequest: a known field asks for what is not supported, or one is unknown and the server is strict.
    """
    unknown = _unknown_fields(extra)
    if unknown and config.refuse_unknown_fields:
        raise InvalidRequest(unknown[0], "this server knows no such field, and was told to refuse such (--strict)")
    return {"x-pdserve-warning": f"ignored unknown fields: {', '.join(unknown)}"} if unknown else {}


def _unknown_fields(extra: Mapping[str, object]) -> list[str]:
    for name, value in extra.items():
        is_neutral = _IS_NEUTRAL.get(name)
        if is_neutral is not None and not is_neutral(value):
            raise InvalidRequest(name, "this value is not supported by this server")
    unknown = sorted(set(extra) - set(_IS_NEUTRAL) - _HARMLESS)
    shown = [name if _PLAIN_NAME.fullmatch(name) else "?" for name in unknown[:_MAX_REPORTED]]
    return [*shown, "..."] if len(unknown) > _MAX_REPORTED else shown
