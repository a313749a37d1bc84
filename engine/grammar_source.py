"""From what a request asks for to the text of a grammar that llguidance compiles."""

import json
import re
from typing import Any

from llguidance import LLMatcher

from pdserve.engine.closed_schema import closed
from pdserve.engine.errors import GrammarFailed
from pdserve.engine.gbnf import lark_of_gbnf
from pdserve.engine.structured_outputs import StructuredOutputsParams

# Between the parts of a JSON value: nothing, one space, or one line break with its indentation. Without a bound a small
# model may write white space until it runs out of tokens.
_WHITESPACE = r"( |\n[ \t]{0,40})?"
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_JSON_OPTIONS: Any = {"whitespace_pattern": _WHITESPACE, "whitespace_flexible": True, "lenient": False}
_SLASH = re.compile(r"\\.|/", re.DOTALL)
_GBNF_RULE = re.compile(r"(?m)^\s*[A-Za-z0-9_-]+\s*::=")
_MAPS_OF_SCHEMAS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_PLAIN_VALUES = frozenset({"const", "default", "enum", "examples"})


def grammar_source(params: StructuredOutputsParams) -> str:
    """Return the grammar of `params` as llguidance reads it; only compiling tells whether it is one.

    Raises:
        GrammarFailed: a GBNF grammar has a wrong syntax, a regex ends in the middle, or the schema is false.
    """
    if params.json is not None:
        return _json_source(json.loads(params.json))
    if params.json_object:
        return _json_source(_ANY_OBJECT)
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(_whole_regex(params.regex))
    if params.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_lark_string, params.choice)))
    assert params.grammar is not None
    return LLMatcher.grammar_from_lark(_lark_source(params.grammar))


def form_behind_thoughts(params: StructuredOutputsParams, is_open: bool) -> StructuredOutputsParams:
    """Return a form of thoughts, which `</think>` ends, and of what `params` asks for behind them.

    With `is_open` they have begun already; without it they need not be there.

    Raises:
        InvalidRequest: it is too large.
        GrammarFailed: as for `grammar_source`.
    """
    start = "thoughts" if is_open else '("<think>" thoughts)?'
    lines = [f"start: {start} GAP? answer", r"thoughts[lazy]: /(?s:.*)<\/think>/", r"GAP: /\n{1,2}/"]
    return StructuredOutputsParams(grammar="\n".join([*lines, f"answer: {_inner_source(params)}"]))


def _inner_source(params: StructuredOutputsParams) -> str:
    """Return what `params` asks for as an expression inside a Lark grammar."""
    if params.json is not None or params.json_object:
        schema = _ANY_OBJECT if params.json is None else _known_schema(json.loads(params.json))
        return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"
    if params.regex is not None:
        return f"/{_SLASH.sub(_escaped_slash, _whole_regex(params.regex))}/".replace("\n", "\\n")
    if params.choice is not None:
        return " | ".join(map(_lark_string, params.choice))
    assert params.grammar is not None
    return f"%lark {{\n{_lark_source(params.grammar)}\n}}"


def _json_source(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(_known_schema(schema)), overrides=_JSON_OPTIONS)


def _known_schema(schema: Any) -> Any:
    if schema is False:
        raise GrammarFailed("no JSON value satisfies the schema false")
    # A schema that says nothing is taken for any object: any JSON value could be a number without an end.
    return _ANY_OBJECT if schema in ({}, True) else closed(_without_neutral_keywords(schema))


def _without_neutral_keywords(schema: Any) -> Any:
    """Leave out keywords that ask for nothing and that the compiler would refuse."""
    if isinstance(schema, list):
        return [_without_neutral_keywords(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, value in schema.items():
        if name in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            kept[name] = {key: _without_neutral_keywords(inner) for key, inner in value.items()}
        elif name in _PLAIN_VALUES:
            kept[name] = value
        elif not (name == "uniqueItems" and value is False):
            kept[name] = _without_neutral_keywords(value)
    return kept


def _lark_source(grammar: str) -> str:
    return lark_of_gbnf(grammar) if _GBNF_RULE.search(grammar) else grammar


def _whole_regex(regex: str) -> str:
    """Return `regex` if its last backslash escapes something; llguidance would drop one that does not."""
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise GrammarFailed("the regex ends with a backslash that escapes nothing")
    return regex


def _escaped_slash(match: re.Match[str]) -> str:
    return "\\/" if match.group() == "/" else match.group()


def _lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")
