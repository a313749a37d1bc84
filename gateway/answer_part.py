"""What an answer consists of: thoughts, text, and calls of functions, in the order in which they come."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text that the model wrote before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpened:
    """Call number `index` of the answer begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of call `index`, JSON text."""

    index: int
    text: str


AnswerPart = Said | Thought | CallOpened | CallArguments


def merged_parts(parts: Sequence[AnswerPart]) -> tuple[AnswerPart, ...]:
    """Return the same with neighbours joined that only continue each other."""
    if len(parts) < 2:
        return tuple(parts)
    merged: list[AnswerPart] = []
    for part in parts:
        match merged[-1] if merged else None, part:
            case Said(before), Said(text):
                merged[-1] = Said(before + text)
            case Thought(before), Thought(text):
                merged[-1] = Thought(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                merged[-1] = CallArguments(index, before + text)
            case _:
                merged.append(part)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class WholeCall:
    """One function call with all of its arguments, JSON text unless the answer was cut."""

    index: int
    name: str
    arguments: str


def whole_parts(parts: Sequence[AnswerPart]) -> list[Said | Thought | WholeCall]:
    """Return `parts` of a finished answer with each call in one; a call's arguments follow each other."""
    whole: list[Said | Thought | WholeCall] = []
    for part in merged_parts(parts):
        match part:
            case CallOpened(index, name):
                whole.append(WholeCall(index, name, ""))
            case CallArguments(index, text):
                call = whole[-1]
                assert isinstance(call, WholeCall) and call.index == index
                whole[-1] = WholeCall(index, call.name, text)
            case _:
                whole.append(part)
    return whole


@dataclass(frozen=True, slots=True)
class AnswerContent:
    """A finished answer, sorted by kind."""

    text: str
    thoughts: str
    calls: tuple[WholeCall, ...]

    @classmethod
    def of(cls, parts: Sequence[AnswerPart]) -> "AnswerContent":
        """Return what `parts` say together."""
        whole = whole_parts(parts)
        return cls(
            "".join([part.text for part in whole if isinstance(part, Said)]),
            "".join([part.text for part in whole if isinstance(part, Thought)]),
            tuple(part for part in whole if isinstance(part, WholeCall)),
        )
