"""Python calls with literal keyword arguments, told as JSON while they arrive. Nothing is evaluated."""

import json
import math
import re
from collections.abc import Callable

from pdserve.gateway.call_text import MAX_DEPTH, CallText, MalformedCall, Reading

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_WORD = re.compile(r"[\w.+-]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?P<point>\.?)[0-9]*|(?P<dot>\.)[0-9]+)(?P<exponent>[eE][+-]?[0-9]+)?")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r"|U000(?!0[dD][89a-fA-F])[0-9a-fA-F]{5}|(?!u[dD][89a-fA-F][0-9a-fA-F]{2}|U0000[dD][89a-fA-F]).)",
    re.DOTALL,
)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


def python_calls(text: CallText) -> Reading[None]:
    """Tell the calls that come next, `[name(argument=value, ...), ...]`; one at least, and a comma may follow the last.

    Raises:
        MalformedCall: they are anything else, or from here on.
    """
    yield from text.expect("[")
    while True:
        yield from _call(text)
        text.settle()
        if (yield from text.peek()) == ",":
            text.position += 1
        elif (yield from text.peek()) != "]":
            raise MalformedCall("neither a comma nor the end")
        if (yield from text.peek()) == "]":
            text.position += 1
            return


def _call(text: CallText) -> Reading[None]:
    name = text.known((yield from text.word(_NAME)))
    yield from text.expect("(")
    seen: set[str] = set()
    while (yield from text.peek()) != ")":
        argument = yield from text.word(_NAME)
        yield from text.expect("=")
        if not argument or argument in seen:
            raise MalformedCall("no argument, or one that is given twice")
        if not seen:
            text.open(name)
        text.tell(f"{', ' if seen else '{'}{_quoted(argument)}: ")
        seen.add(argument)
        yield from _value(text, 0)
        if (yield from text.peek()) == ",":
            text.position += 1
        elif (yield from text.peek()) != ")":
            raise MalformedCall("neither a comma nor the end")
    text.position += 1
    if not seen:
        text.open(name)
    text.tell("}" if seen else "{}")
    text.close()


def _value(text: CallText, depth: int) -> Reading[None]:
    match (yield from text.peek()):
        case "[":
            yield from _items(text, "]", _value, depth + 1)
        case "(":
            yield from _items(text, ")", _value, depth + 1)
        case "{":
            yield from _items(text, "}", _entry, depth + 1)
        case "'" | '"' as quote:
            yield from _string(text, quote)
        case _:
            text.tell(_scalar((yield from text.word(_WORD))))


def _items(text: CallText, closing: str, item: Callable[[CallText, int], Reading[None]], depth: int) -> Reading[None]:
    if depth > MAX_DEPTH:
        raise MalformedCall("nested too deep")
    text.position += 1
    text.tell("{" if closing == "}" else "[")
    has_some = False
    while (yield from text.peek()) != closing:
        if has_some:
            yield from text.expect(",")
            if (yield from text.peek()) == closing:
                break
            text.tell(", ")
        yield from item(text, depth)
        has_some = True
    text.position += 1
    text.tell("}" if closing == "}" else "]")


def _entry(text: CallText, depth: int) -> Reading[None]:
    quote = yield from text.peek()
    if quote not in "\"'":
        raise MalformedCall("a key is a string")
    yield from _string(text, quote)
    yield from text.expect(":")
    text.tell(": ")
    yield from _value(text, depth)


def _string(text: CallText, quote: str) -> Reading[None]:
    text.position += 1
    text.tell('"')
    while True:
        if plain := (yield from text.run(_PLAIN[quote])):
            text.tell(_quoted(plain)[1:-1])
        char = yield from text.next()
        if char == quote:
            text.position += 1
            text.tell('"')
            return
        if char == "\\":
            text.tell(_quoted(_unescaped((yield from text.escape(_ESCAPE))))[1:-1])


def _scalar(word: str) -> str:
    if word in _WORDS:
        return _WORDS[word]
    number = _NUMBER.fullmatch(word)
    if number is None:
        raise MalformedCall("not a literal")
    if not (number["point"] or number["dot"] or number["exponent"]):
        return str(int(word))
    value = float(word)
    if not math.isfinite(value):
        raise MalformedCall("not a finite number")
    return json.dumps(value)


def _unescaped(escape: str) -> str:
    """Return what an escape stands for; one that Python does not know stands for itself."""
    kind, digits = escape[1], escape[2:]
    if kind == "u" and len(digits) > 4:
        return bytes.fromhex(digits.replace("\\u", "")).decode("utf-16-be")
    if digits:
        return chr(int(digits, 16))
    return _ESCAPED.get(kind, kind if kind in "\\'\"" else escape)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
