"""GBNF, the EBNF of llama.cpp, to Lark as llguidance reads it.

A rule that refers to no rule that refers back to it is a regular expression and becomes a terminal (a lexeme), the
others stay rules. Terminals match as much as they can, as in every lexer.
"""

import json
import re
from dataclasses import dataclass

from pdserve.engine.errors import GrammarFailed

_ROOT = "root"
_MAX_DEPTH = 32
_MAX_REPEAT = 100_000
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE_IN_LINE = re.compile(r"(?:[ \t]|#[^\n]*)*")
_DEFINES = re.compile(r"[ \t]*::=")
_COUNTS = re.compile(r"\{\s*(\d{1,7})\s*(,?)\s*(\d{1,7})?\s*\}")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_PLAIN_ESCAPES = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "\\": "\\",
    '"': '"',
    "[": "[",
    "]": "]",
    "-": "-",
    "^": "^",
    "/": "/",
}
_SUFFIXES = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule as pieces of Lark: text as it stands, and names of other rules."""

    pieces: tuple["str | _Ref", ...]

    @property
    def names(self) -> set[str]:
        return {piece.name for piece in self.pieces if isinstance(piece, _Ref)}


@dataclass(frozen=True, slots=True)
class _Ref:
    name: str
    at: int


def lark_of_gbnf(text: str) -> str:
    """Return the Lark form of a GBNF grammar.

    Raises:
        GrammarFailed: it is not GBNF, has no `root`, or refers to a rule that it lacks; the text says where.
    """
    rules = _Reader(text).rules()
    if _ROOT not in rules:
        raise GrammarFailed("the grammar has no rule named root")
    for rule in rules.values():
        for piece in rule.pieces:
            if isinstance(piece, _Ref) and piece.name not in rules:
                raise _error(text, piece.at, f"there is no rule named {piece.name}")
    names = _lark_names(rules, _regular(rules))
    lines = [f"{names[name]}: {_body(rule, names)}" for name, rule in rules.items()]
    return "\n".join([f"start: {names[_ROOT]}", *lines])


def _regular(rules: dict[str, _Rule]) -> set[str]:
    """Return the names of the rules from which no rule can be reached again: the least fixed point, leaves first."""
    users: dict[str, set[str]] = {name: set() for name in rules}
    num_open = {name: len(rule.names) for name, rule in rules.items()}
    for name, rule in rules.items():
        for used in rule.names:
            users[used].add(name)
    regular: set[str] = set()
    ready = [name for name, count in num_open.items() if count == 0]
    while ready:
        name = ready.pop()
        regular.add(name)
        for user in users[name]:
            num_open[user] -= 1
            if num_open[user] == 0:
                ready.append(user)
    return regular


def _lark_names(rules: dict[str, _Rule], regular: set[str]) -> dict[str, str]:
    # Numbered: Lark tells terminals from rules by case, and names of GBNF may differ in case alone.
    return {name: f"T{index}" if name in regular else f"r{index}" for index, name in enumerate(rules)}


def _body(rule: _Rule, names: dict[str, str]) -> str:
    return " ".join([names[piece.name] if isinstance(piece, _Ref) else piece for piece in rule.pieces]) or '""'


class _Reader:
    """Reads a grammar once, left to right, into the pieces of its rules."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, _Rule]:
        rules: dict[str, _Rule] = {}
        self._skip(_SPACE)
        while self._at < len(self._text):
            name = self._name()
            if name in rules:
                raise self._error(f"the rule {name} is defined twice")
            if self._match(_DEFINES) is None:
                raise self._error("expected ::=")
            self._skip(_SPACE)
            rules[name] = _Rule(tuple(self._alternatives(0)))
            self._skip(_SPACE)
        return rules

    def _alternatives(self, depth: int) -> list[str | _Ref]:
        if depth > _MAX_DEPTH:
            raise self._error(f"groups are nested deeper than {_MAX_DEPTH}")
        pieces = self._sequence(depth)
        while self._peek() == "|":
            self._at += 1
            self._skip(_SPACE)
            pieces += ["|", *self._sequence(depth)]
        return pieces

    def _sequence(self, depth: int) -> list[str | _Ref]:
        space = _SPACE if depth else _SPACE_IN_LINE
        pieces: list[str | _Ref] = []
        while (item := self._item(depth)) is not None:
            pieces += self._repeated(item)
            self._skip(space)
            if not depth and self._continues():
                self._skip(_SPACE)
        return pieces or ['""']

    def _continues(self) -> bool:
        """Whether an alternative of a rule follows on the next line."""
        following = _SPACE.match(self._text, self._at)
        return following is not None and self._text[following.end() : following.end() + 1] == "|"

    def _item(self, depth: int) -> list[str | _Ref] | None:
        char, start = self._peek(), self._at
        if char == '"':
            return [json.dumps(self._literal(), ensure_ascii=False)]
        if char == "[":
            return [f"/{self._char_class()}/"]
        if char == ".":
            self._at += 1
            return ["/(?s:.)/"]
        if char == "(":
            self._at += 1
            self._skip(_SPACE)
            inner = self._alternatives(depth + 1)
            if self._peek() != ")":
                raise self._error("expected )")
            self._at += 1
            return ["(", *inner, ")"]
        if _NAME.match(self._text, self._at):
            return [_Ref(self._name(), start)]
        if char in ("", "|", ")", "\n", "\r") and not (char == ")" and depth == 0):
            return None
        raise self._error(f"unexpected {char!r}")

    def _repeated(self, item: list[str | _Ref]) -> list[str | _Ref]:
        self._skip(_SPACE_IN_LINE)
        suffix = _SUFFIXES.get(self._peek())
        if suffix is not None:
            self._at += 1
            return ["(", *item, ")", {(0, None): "*", (1, None): "+", (0, 1): "?"}[suffix]]
        if self._peek() != "{":
            return item
        counts = self._match(_COUNTS)
        if counts is None:
            raise self._error("expected {m}, {m,} or {m,n}")
        low, comma, high = int(counts[1]), counts[2], counts[3]
        most = low if not comma else None if high is None else int(high)
        if max(low, most or 0) > _MAX_REPEAT or (most is not None and most < low):
            raise self._error(f"a repetition counts upwards and to {_MAX_REPEAT} at most")
        return ["(", *item, ")", f"{{{low},{'' if most is None else most}}}"]

    def _literal(self) -> str:
        start = self._at
        self._at += 1
        chars: list[str] = []
        while self._peek() != '"':
            if self._peek() in ("", "\n"):
                self._at = start
                raise self._error("this string does not end")
            chars.append(self._char())
        self._at += 1
        return "".join(chars)

    def _char_class(self) -> str:
        start = self._at
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        parts: list[str] = []
        while self._peek() != "]":
            if self._peek() in ("", "\n"):
                self._at = start
                raise self._error("this character class does not end")
            first = self._char()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._char()
                if last < first:
                    raise self._error("a range of characters counts downwards")
                parts.append(f"{_in_class(first)}-{_in_class(last)}")
            else:
                parts.append(_in_class(first))
        self._at += 1
        if not parts:
            raise self._error("a character class must not be empty")
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _char(self) -> str:
        if self._peek() != "\\":
            self._at += 1
            return self._text[self._at - 1]
        escape = self._match(_ESCAPE)
        code = next((group for group in escape.groups()[:3] if group), None) if escape else None
        if code is not None and int(code, 16) <= 0x10FFFF and not 0xD800 <= int(code, 16) <= 0xDFFF:
            return chr(int(code, 16))
        if escape is None or escape[4] not in _PLAIN_ESCAPES:
            raise self._error("this escape is not known")
        return _PLAIN_ESCAPES[escape[4]]

    def _name(self) -> str:
        name = self._match(_NAME)
        if name is None:
            raise self._error("expected the name of a rule")
        return name[0]

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self._match(pattern)

    def _error(self, message: str) -> GrammarFailed:
        return _error(self._text, self._at, message)


def _in_class(char: str) -> str:
    if char.isalnum() and char.isascii():
        return char
    return f"\\u{{{ord(char):x}}}"


def _error(text: str, at: int, message: str) -> GrammarFailed:
    line = text.count("\n", 0, at) + 1
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    return GrammarFailed(f"line {line}, column {column}: {message}")
