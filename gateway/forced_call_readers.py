"""How answers are read whose grammar leaves nothing but calls."""

from collections.abc import Sequence

from pdserve.gateway.answer_part import AnswerPart, CallArguments, CallOpened
from pdserve.gateway.call_text import CallText, Reading
from pdserve.gateway.json_calls import json_calls


class NamedCallReader:
    """The whole answer is the arguments of one function."""

    broken_calls: Sequence[int] = ()  # the grammar sees to that

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_open = False

    def push(self, text: str) -> list[AnswerPart]:
        """Return the next piece of the arguments, the call itself before the first one."""
        if not text:
            return []
        opened: list[AnswerPart] = [] if self._is_open else [CallOpened(0, self._name)]
        self._is_open = True
        return [*opened, CallArguments(0, text)]

    def finish(self) -> list[AnswerPart]:
        """Return nothing: all is told."""
        return []


class RequiredCallsSyntax:
    """The answer is one list of objects, each with a name and its arguments."""

    markers: tuple[str, ...] = ()
    bare: str = "["
    separators: str = ""

    def read(self, text: CallText, marker: str) -> Reading[None]:
        yield from json_calls(text)
