"""From the text of one answer to its parts: thoughts first, then text and calls, as the request has them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.gateway.answer_part import AnswerPart, CallArguments, CallOpened, Said
from pdserve.gateway.forced_call_readers import NamedCallReader, RequiredCallsSyntax
from pdserve.gateway.think_reader import ThinkReader
from pdserve.gateway.tool_call_reader import ToolCallReader
from pdserve.gateway.tool_syntax import ToolSyntax


@dataclass(frozen=True, slots=True)
class NamedCall:
    """The answer is the arguments of this function."""

    name: str


@dataclass(frozen=True, slots=True)
class RequiredCalls:
    """The answer is a list of calls."""


@dataclass(frozen=True, slots=True)
class FreeCalls:
    """The model may call functions of these names, in its own syntax."""

    syntax: ToolSyntax
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """How the text of an answer is read. `is_thought_open`: the prompt has opened the thoughts."""

    calls: NamedCall | RequiredCalls | FreeCalls | None = None
    is_only_first: bool = False  # call; further ones are left out
    has_thoughts: bool = False
    is_thought_open: bool = False
    has_short_call_ids: bool = False  # nine letters and digits: all that Mistral's templates take

    @property
    def is_forced(self) -> bool:
        """Whether the answer has calls and no text."""
        return isinstance(self.calls, NamedCall | RequiredCalls)


PLAIN = AnswerReading()


class _TextReader(Protocol):
    @property
    def broken_calls(self) -> Sequence[int]: ...

    def push(self, text: str) -> list[AnswerPart]: ...

    def finish(self) -> list[AnswerPart]: ...


class _PlainReader:
    broken_calls: Sequence[int] = ()

    def push(self, text: str) -> list[AnswerPart]:
        return [Said(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        return []


class AnswerReader:
    """The reader of one answer. Counts its calls, and the tokens of its thoughts, with their tags."""

    def __init__(self, reading: AnswerReading) -> None:
        self.num_thought_tokens = 0
        self._num_opened = 0
        self._has_calls = reading.calls is not None
        self._is_only_first = reading.is_only_first
        self._thoughts = ThinkReader(reading.is_thought_open) if reading.has_thoughts else None
        self._rest = _text_reader(reading)

    @property
    def num_calls(self) -> int:
        """How many calls were told that can be made: one whose arguments end too early cannot."""
        if not self._num_opened:
            return 0
        broken = [index for index in self._rest.broken_calls if not self._is_only_first or index == 0]
        return self._num_opened - len(broken)

    def push(self, text: str, num_tokens: int) -> list[AnswerPart]:
        """Return the parts that `text` completes; `num_tokens` are behind it."""
        if self._thoughts is None:
            return self._kept(self._rest.push(text))
        was_thinking = self._thoughts.is_thinking
        thoughts, behind = self._thoughts.push(text)
        if was_thinking or self._thoughts.is_thinking:
            self.num_thought_tokens = num_tokens
        return [*thoughts, *self._kept(self._rest.push(behind))]

    def finish(self) -> list[AnswerPart]:
        """Return the last parts."""
        if self._thoughts is None:
            return self._kept(self._rest.finish())
        thoughts, behind = self._thoughts.finish()
        return [*thoughts, *self._kept([*self._rest.push(behind), *self._rest.finish()])]

    def _kept(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        if not self._has_calls:
            return parts
        if self._is_only_first:
            parts = [part for part in parts if not isinstance(part, CallOpened | CallArguments) or part.index == 0]
        self._num_opened += sum(isinstance(part, CallOpened) for part in parts)
        return parts


def _text_reader(reading: AnswerReading) -> _TextReader:
    match reading.calls:
        case NamedCall(name):
            return NamedCallReader(name)
        case RequiredCalls():
            return ToolCallReader(RequiredCallsSyntax(), None)
        case FreeCalls(syntax, names):
            return ToolCallReader(syntax, names)
        case None:
            return _PlainReader()
