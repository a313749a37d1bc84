"""Finds the calls that a model makes in the text of its answer, while the text arrives."""

import re

from pdserve.gateway.answer_part import AnswerPart, Said
from pdserve.gateway.call_text import CallText, CutCall, MalformedCall, Reading
from pdserve.gateway.tool_syntax import ToolSyntax

_SPACE = " \t\r\n"
_BETWEEN_CALLS = re.compile(r"[\s,;\]})]*")


class ToolCallReader:
    """Tells text at once, and a call as soon as its name is known: its arguments follow as they are written.

    What turns out to be no call before that is text, and so is what follows arguments that cannot go on; nothing is
    lost. White space beside a call is left out. A call of a function that is not among `names` (None: any) is text.
    How the answer is cut into pieces changes nothing but where text and arguments are cut.
    """

    def __init__(self, syntax: ToolSyntax, names: frozenset[str] | None) -> None:
        self.broken_calls: list[int] = []  # whose arguments end too early
        self._syntax = syntax
        self._names = names
        self._held = ""  # may begin a block
        self._space = ""  # before `_held`: text unless a call follows
        self._block: _Block | None = None
        self._num_calls = 0
        self._has_spoken = False  # since the beginning or the last call

    def push(self, text: str) -> list[AnswerPart]:
        """Return what is certain now."""
        self._held += text
        return self._read(is_end=False)

    def finish(self) -> list[AnswerPart]:
        """Return the rest."""
        parts = self._read(is_end=True)
        if self._space and (self._has_spoken or not self._num_calls):
            parts.append(Said(self._space))
        self._space = ""
        return parts

    def _read(self, is_end: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while self._held or (self._block is not None and is_end):
            if self._block is None and not self._begin(parts, is_end):
                break
            block, text = self._block, self._held
            assert block is not None
            self._held = ""
            block.read(text, is_end)
            parts += block.text.take()
            if not block.is_over:
                break
            self._leave(parts, block)
        return parts

    def _begin(self, parts: list[AnswerPart], is_end: bool) -> bool:
        """Tell the text before the next block; whether one begins in what is held."""
        between = _SPACE + self._syntax.separators if self._num_calls and not self._has_spoken else _SPACE
        text = self._held.lstrip(between)
        self._space += self._held[: len(self._held) - len(text)]
        if not self._has_spoken and text and text[0] == self._syntax.bare:
            start, marker = 0, text[0]
        else:
            start, marker = self._next_marker(text, is_end)
        self._held = text[start:]
        if start:
            before = text[:start].rstrip(_SPACE)
            self._say(parts, before)
            self._space = text[len(before) : start]
        if not marker:
            return False
        self._block = _Block(self._syntax, marker, CallText(self._names, self._num_calls))
        return True

    def _next_marker(self, text: str, is_end: bool) -> tuple[int, str]:
        """Return where the next marker begins, and the marker, or "" where only its beginning may be there."""
        found = [(text.find(marker), marker) for marker in self._syntax.markers]
        whole = [place for place in found if place[0] >= 0]
        if whole:
            return min(whole)
        if is_end or not found:
            return len(text), ""
        return min(len(text) - _len_of_beginning(text, marker) for marker in self._syntax.markers), ""

    def _leave(self, parts: list[AnswerPart], block: "_Block") -> None:
        """Go on behind `block`, or with as much of it as is text after all."""
        self._block = None
        self._held = block.text.untold
        self.broken_calls += [block.text.num_calls] if block.text.is_open else []
        has_told = block.text.num_calls > self._num_calls or block.text.is_open
        self._num_calls = block.text.num_calls + block.text.is_open
        if has_told:
            self._space = ""
            self._has_spoken = False
        if block.is_cut and has_told and (block.text.is_open or _BETWEEN_CALLS.fullmatch(self._held)):
            self._held = ""  # half a literal, or what closes a list
        elif block.is_malformed and self._held:
            size = 1 if has_told else len(block.marker)
            self._say(parts, self._held[:size])
            self._held = self._held[size:]

    def _say(self, parts: list[AnswerPart], text: str) -> None:
        parts.append(Said(self._space + text))
        self._space = ""
        self._has_spoken = True


class _Block:
    """One block of calls and its reader."""

    def __init__(self, syntax: ToolSyntax, marker: str, text: CallText) -> None:
        self.text = text
        self.marker = marker
        self.is_over = False
        self.is_malformed = False
        self.is_cut = False
        self._reading: Reading[None] = syntax.read(text, marker)

    def read(self, text: str, is_end: bool) -> None:
        """Read on; the first text begins with the marker."""
        self.text.feed(text, is_end)
        try:
            next(self._reading)
        except StopIteration:
            self.text.settle()
            self.is_over = True
        except MalformedCall as error:
            self.is_over = self.is_malformed = True
            self.is_cut = isinstance(error, CutCall)


def _len_of_beginning(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `marker`."""
    if text.rfind(marker[0], 1 - len(marker)) < 0:
        return 0  # as nearly always
    return next(size for size in range(min(len(text), len(marker) - 1), -1, -1) if text.endswith(marker[:size]))
