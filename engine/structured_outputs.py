"""What form an answer must have: a JSON schema, any JSON object, a regular expression, a grammar, one of several texts.

Torch-free: the gateway, the wire and the engine share it. Says what is asked for, not how it is enforced.
"""

import json as json_text
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.engine.errors import InvalidRequest

MAX_SCHEMA_CHARS = 128 * 1024
MAX_GRAMMAR_CHARS = 64 * 1024  # also of a regular expression, and of all choices together
MAX_CHOICES = 4096
_MAX_SCHEMA_DEPTH = 100
_FORMS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one form that the answer must have; validates its shape and size, and names the field that is wrong.

    `json` is a JSON schema, given as a mapping, as true or false, or as their JSON text, and kept as text. `grammar` is
    in GBNF (llama.cpp's EBNF, its first rule `root`) or in Lark as llguidance reads it (its first rule `start`).
    `regex` is matched against the whole answer. `json_object=True` is any JSON object.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        _check_text("regex", self.regex)
        _check_text("grammar", self.grammar)
        if not isinstance(self.json_object, bool):
            raise InvalidRequest("json_object", f"must be true or false, got {self.json_object!r}")
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            named = f"got {' and '.join(given)}" if given else "got none"
            raise InvalidRequest("structured_outputs", f"needs exactly one of {', '.join(_FORMS)}; {named}")

    @property
    def form(self) -> str:
        """The name of the field that says what is asked for."""
        return next(name for name in _FORMS if getattr(self, name) not in (None, False))


GuidedDecodingParams = StructuredOutputsParams  # the name that older scripts know it by


def _check_text(field: str, text: object) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise InvalidRequest(field, f"must be a string, got {type(text).__name__}")
    if not text and field == "grammar":
        raise InvalidRequest(field, "must not be empty")
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(field, f"has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are allowed")
    _check_unicode(field, text)


def _check_unicode(field: str, text: str) -> None:
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise InvalidRequest(field, "contains half of a surrogate pair, which is no character")


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, list | tuple):
        raise InvalidRequest("choice", "must be a list of strings")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidRequest("choice", f"must have between 1 and {MAX_CHOICES} entries, got {len(choices)}")
    for index, text in enumerate(choices):
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"choice.{index}", "must be a non-empty string")
        _check_unicode(f"choice.{index}", text)
    if sum(map(len, choices)) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest("choice", f"all entries together may have at most {MAX_GRAMMAR_CHARS} characters")
    return tuple(choices)


def _schema_text(schema: object) -> str:
    """Return `schema` as JSON text of bounded size and depth."""
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA_CHARS:
            raise InvalidRequest(
                "json", f"the schema has {len(schema)} characters, at most {MAX_SCHEMA_CHARS} are allowed"
            )
        try:
            schema = json_text.loads(schema)
        except (ValueError, RecursionError):
            raise InvalidRequest("json", "the schema is not JSON text") from None
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest("json", f"a JSON schema is an object, true or false, not {type(schema).__name__}")
    _check_depth(schema)
    try:
        text = json_text.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidRequest("json", f"the schema cannot be written as JSON: {error}") from None
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidRequest("json", f"the schema has {len(text)} characters, at most {MAX_SCHEMA_CHARS} are allowed")
    _check_unicode("json", text)
    return text


def _check_depth(schema: object) -> None:
    level: list[Any] = [schema]
    for _ in range(_MAX_SCHEMA_DEPTH):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ())
        ]
        if not level:
            return
    raise InvalidRequest("json", f"the schema is nested deeper than {_MAX_SCHEMA_DEPTH} levels")
