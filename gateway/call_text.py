"""The text of a block of function calls while it arrives: how far it is read, and what is told of it already.

Readers are generators that pause where more text is needed, so that a grammar is written as if all of it were there.
"""

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pdserve.gateway.answer_part import CallArguments, CallOpened

MAX_DEPTH = 64  # of values in values
_MAX_WORD_CHARS = 400
_SPACE = re.compile(r"\s*")
_PARTIAL_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?|U[0-9a-fA-F]{0,7})?"
)

Value = TypeVar("Value")
Reading = Generator[None, None, Value]


class MalformedCall(ValueError):
    """What looked like a function call is none, or not from here on: what is not told yet is text for the user."""


class CutCall(MalformedCall):
    """The answer ends in the middle of a call."""


class CallText:
    """What has arrived of one block, from its marker on.

    `position` is behind what was read. What is told is never taken back; what is read but not told may still turn out
    to be text. Calls of functions that are not among `names` (None: any) are malformed.
    """

    def __init__(self, names: frozenset[str] | None, num_calls: int) -> None:
        self.position = 0
        self.num_calls = num_calls  # of the answer so far
        self.is_open = False  # the arguments of a call are being told
        self._names = names
        self._text = ""
        self._num_told = 0  # characters
        self._is_end = False
        self._is_silent = False
        self._parts: list[CallOpened | CallArguments] = []

    @property
    def untold(self) -> str:
        """What is not told yet."""
        return self._text[self._num_told :]

    def feed(self, text: str, is_end: bool) -> None:
        """Add `text`, the last one with `is_end`."""
        if not self._is_silent:  # a reader that captures a value remembers where it began
            self._text = self.untold
            self.position -= self._num_told
            self._num_told = 0
        self._text += text
        self._is_end = is_end

    def take(self) -> list[CallOpened | CallArguments]:
        """Return what was told since the last time."""
        parts, self._parts = self._parts, []
        return parts

    def known(self, name: object) -> str:
        """Return the name of a function that may be called."""
        if not isinstance(name, str) or (self._names is not None and name not in self._names):
            raise MalformedCall("no function of that name")
        return name

    def open(self, name: str) -> None:
        """Tell that a call begins; its arguments are told next, until `close`."""
        self._parts.append(CallOpened(self.num_calls, name))
        self.is_open = True
        self._num_told = self.position

    def close(self) -> None:
        """Tell that the arguments are complete."""
        self.is_open = False
        self.num_calls += 1
        self._num_told = self.position

    def settle(self) -> None:
        """Make sure that what was read is never shown as text."""
        self._num_told = self.position

    def tell(self, arguments: str) -> None:
        """Tell more of the arguments; they stand for all that was read."""
        if not self._is_silent:
            self._parts.append(CallArguments(self.num_calls, arguments))
            self._num_told = self.position

    def copy(self) -> None:
        """Tell what was read since the last time as it stands."""
        self.tell(self._text[self._num_told : self.position])

    def copy_rest(self) -> None:
        """Tell everything that is there as it stands."""
        self.position = len(self._text)
        self.copy()

    def step(self) -> None:
        """Go behind the next character and copy it."""
        self.position += 1
        self.copy()

    @contextmanager
    def captured(self) -> Iterator[list[str]]:
        """Tell nothing of what the block reads; when it has, the list holds its text."""
        start, content = self.position, list[str]()
        self._is_silent = True
        try:
            yield content
        finally:
            self._is_silent = False
        content.append(self._text[start : self.position])

    def more(self) -> Reading[None]:
        """Wait for more text.

        Raises:
            CutCall: there is none.
        """
        if self._is_end:
            raise CutCall("the answer ends here")
        yield

    def peek(self) -> Reading[str]:
        """Go behind white space and return the next character."""
        while True:
            self.position = _end_of(_SPACE, self._text, self.position)
            if self.position < len(self._text):
                return self._text[self.position]
            yield from self.more()

    def expect(self, char: str) -> Reading[None]:
        """Go behind `char`, which must come next."""
        if (yield from self.peek()) != char:
            raise MalformedCall(f"{char!r} is missing")
        self.position += 1

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Return what matches next, whole because something else follows it."""
        yield from self.peek()
        while True:
            end = _end_of(pattern, self._text, self.position)
            if end - self.position > _MAX_WORD_CHARS:
                raise MalformedCall("too long")
            if end < len(self._text):
                start, self.position = self.position, end
                return self._text[start:end]
            yield from self.more()

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Return what matches next, or as much of it as is there; empty if something else comes next."""
        while self.position == len(self._text):
            yield from self.more()
        start, self.position = self.position, _end_of(pattern, self._text, self.position)
        return self._text[start : self.position]

    def escape(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Return the escape that a backslash begins here, both halves of a surrogate pair."""
        while _PARTIAL_ESCAPE.fullmatch(self._text, self.position):
            yield from self.more()
        match = pattern.match(self._text, self.position)
        if match is None:
            raise MalformedCall("no such escape")
        self.position = match.end()
        return match.group()

    def next(self) -> Reading[str]:
        """Return the next character, white space or not."""
        while self.position == len(self._text):
            yield from self.more()
        return self._text[self.position]

    def skip(self, tag: str) -> Reading[None]:
        """Go behind white space and `tag`, if it comes next."""
        self.settle()
        while True:
            rest = self._text[self.position :].lstrip()
            if rest.startswith(tag):
                self.position = len(self._text) - len(rest) + len(tag)
                break
            if self._is_end or not tag.startswith(rest):
                break
            yield


def _end_of(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return position if match is None else match.end()
