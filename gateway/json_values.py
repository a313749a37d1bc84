"""JSON in a call, told while it arrives: only what begins valid JSON is ever told."""

import json
import math
import re
from collections.abc import Callable

from pdserve.gateway.call_text import MAX_DEPTH, CallText, CutCall, MalformedCall, Reading

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})'
)
_WORD = re.compile(r"[\w.+-]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?P<rest>(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")
_LITERALS = ("true", "false", "null")


def json_object(text: CallText) -> Reading[None]:
    """Tell the object that comes next, as it stands. Where the answer ends within it, all of the rest is told."""
    try:
        yield from json_value(text)
    except CutCall:
        text.copy_rest()
        raise


def json_value(text: CallText, depth: int = 0) -> Reading[None]:
    """Tell the value that comes next, which lies in `depth` others.

    Raises:
        MalformedCall: here something stands that no value has; text told before is the beginning of one.
    """
    match (yield from text.peek()):
        case "{":
            yield from _items(text, "}", _member, depth + 1)
        case "[":
            yield from _items(text, "]", json_value, depth + 1)
        case '"':
            yield from json_string(text)
        case _:
            _check_scalar((yield from text.word(_WORD)))
            text.copy()


def json_string(text: CallText) -> Reading[None]:
    """Tell the string that comes next. A control character is told as its escape, without which it is no JSON."""
    if (yield from text.peek()) != '"':
        raise MalformedCall("not a string")
    text.step()
    while True:
        if (yield from text.run(_PLAIN)):
            text.copy()
        char = yield from text.next()
        if char == '"':
            text.step()
            return
        if char == "\\":
            yield from text.escape(_ESCAPE)
            text.copy()
        elif char < " ":
            text.position += 1
            text.tell(json.dumps(char)[1:-1])


def _items(text: CallText, closing: str, item: Callable[[CallText, int], Reading[None]], depth: int) -> Reading[None]:
    if depth > MAX_DEPTH:
        raise MalformedCall("nested too deep")
    text.step()
    char = yield from text.peek()
    while char != closing:
        yield from item(text, depth)
        char = yield from text.peek()
        if char == ",":
            text.step()
            if (yield from text.peek()) == closing:
                raise MalformedCall("nothing follows the comma")
        elif char != closing:
            raise MalformedCall("neither a comma nor the end")
    text.step()


def _member(text: CallText, depth: int) -> Reading[None]:
    yield from json_string(text)
    if (yield from text.peek()) != ":":
        raise MalformedCall("':' is missing")
    text.step()
    yield from json_value(text, depth)


def _check_scalar(word: str) -> None:
    if word in _LITERALS:
        return
    number = _NUMBER.fullmatch(word)
    if number is None or (number["rest"] and not math.isfinite(float(word))):
        raise MalformedCall("not a value of JSON")
