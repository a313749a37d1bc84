"""Strict two-way codecs for the parts of a message: each knows its bounds and names the place of what is
wrong.

`to_wire` makes msgpack-able (and JSON-able) values, `from_wire` checks every type and bound of what a peer
sent. Knows no message; `codec.py` composes them.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat
from typing import Any, Protocol, TypeVar

from pdserve.control.errors import MalformedMessage

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

MAX_TOKENS = 4 * 2**20
MAX_ID_CHARS = 512


class Codec(Protocol[T_co]):
    """Both directions for one kind of value."""

    def to_wire(self, value: Any) -> Any:
        """Return `value` as msgpack-able values."""

    def from_wire(self, wire: Any, where: str) -> T_co:
        """Check and rebuild; raises MalformedMessage with `where`."""


@dataclass(frozen=True, slots=True)
class Integer:
    """An int in [low, high]; a bool is not one."""

    low: int = 0
    high: int = 2**63 - 1

    def to_wire(self, value: int) -> int:
        """Return the int itself."""
        return value

    def from_wire(self, wire: Any, where: str) -> int:
        """Check type and range."""
        if type(wire) is not int:
            raise MalformedMessage(where, f"expected an integer, got {type(wire).__name__}")
        if not self.low <= wire <= self.high:
            raise MalformedMessage(where, f"{wire} is outside [{self.low}, {self.high}]")
        return wire


@dataclass(frozen=True, slots=True)
class Number:
    """A float that is not NaN; infinite only where allowed (a masked token's logprob is -inf)."""

    finite: bool = True

    def to_wire(self, value: float) -> float:
        """Return a float, also for an int."""
        return float(value)

    def from_wire(self, wire: Any, where: str) -> float:
        """Check type and finiteness."""
        if type(wire) is not float and type(wire) is not int:
            raise MalformedMessage(where, f"expected a number, got {type(wire).__name__}")
        if math.isnan(wire) or (self.finite and math.isinf(wire)):
            raise MalformedMessage(where, f"{wire} is not allowed")
        return float(wire)


@dataclass(frozen=True, slots=True)
class Flag:
    """True or False."""

    def to_wire(self, value: bool) -> bool:
        """Return the bool itself."""
        return value

    def from_wire(self, wire: Any, where: str) -> bool:
        """Check the type."""
        if type(wire) is not bool:
            raise MalformedMessage(where, f"expected true or false, got {type(wire).__name__}")
        return wire


@dataclass(frozen=True, slots=True)
class Text:
    """A string of bounded length."""

    max_chars: int = MAX_ID_CHARS

    def to_wire(self, value: str) -> str:
        """Return the string itself; refuse what the peer would refuse."""
        if len(value) > self.max_chars:
            raise MalformedMessage("text", f"longer than {self.max_chars} characters")
        return value

    def from_wire(self, wire: Any, where: str) -> str:
        """Check type and length."""
        if type(wire) is not str:
            raise MalformedMessage(where, f"expected a string, got {type(wire).__name__}")
        if len(wire) > self.max_chars:
            raise MalformedMessage(where, f"longer than {self.max_chars} characters")
        return wire


@dataclass(frozen=True, slots=True)
class Prose:
    """A sentence for people: cut to its bound and cleaned of what UTF-8 cannot carry, never refused for it."""

    max_chars: int

    def to_wire(self, value: str) -> str:
        """Return as much of the text as fits."""
        return value[: self.max_chars].encode("utf-8", "replace").decode()

    def from_wire(self, wire: Any, where: str) -> str:
        """Check type and length."""
        return Text(self.max_chars).from_wire(wire, where)


class Choice:
    """A member of a StrEnum."""

    def __init__(self, kind: type[StrEnum]) -> None:
        self._kind = kind
        self._members = {member.value: member for member in kind}

    def to_wire(self, value: StrEnum) -> str:
        """Return the member's text."""
        return value.value

    def from_wire(self, wire: Any, where: str) -> StrEnum:
        """Look the member up."""
        member = self._members.get(wire) if type(wire) is str else None
        if member is None:
            raise MalformedMessage(where, f"not a {self._kind.__name__}")
        return member


@dataclass(frozen=True, slots=True)
class Maybe:
    """A value or None."""

    inner: Codec[Any]

    def to_wire(self, value: Any) -> Any:
        """Return None or the inner form."""
        return None if value is None else self.inner.to_wire(value)

    def from_wire(self, wire: Any, where: str) -> Any:
        """Check unless None."""
        return None if wire is None else self.inner.from_wire(wire, where)


@dataclass(frozen=True, slots=True)
class Many:
    """A tuple of bounded length, each item alike."""

    inner: Codec[Any]
    max_items: int

    def to_wire(self, value: tuple[Any, ...]) -> list[Any]:
        """Return a list of inner forms; refuse what the peer would refuse."""
        if len(value) > self.max_items:
            raise MalformedMessage("array", f"{len(value)} items, at most {self.max_items}")
        return [self.inner.to_wire(item) for item in value]

    def from_wire(self, wire: Any, where: str) -> tuple[Any, ...]:
        """Check the length, then each item."""
        if not isinstance(wire, list):
            raise MalformedMessage(where, f"expected an array, got {type(wire).__name__}")
        if len(wire) > self.max_items:
            raise MalformedMessage(where, f"{len(wire)} items, at most {self.max_items}")
        return tuple(map(self.inner.from_wire, wire, repeat(where)))


@dataclass(frozen=True, slots=True)
class Pair:
    """Two values as an array of two."""

    first: Codec[Any]
    second: Codec[Any]

    def to_wire(self, value: tuple[Any, Any]) -> list[Any]:
        """Return a list of two."""
        return [self.first.to_wire(value[0]), self.second.to_wire(value[1])]

    def from_wire(self, wire: Any, where: str) -> tuple[Any, Any]:
        """Check both."""
        if not isinstance(wire, list) or len(wire) != 2:
            raise MalformedMessage(where, "expected an array of two")
        return self.first.from_wire(wire[0], where), self.second.from_wire(wire[1], where)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Token ids: as Many(Integer), checked in bulk because a prompt has a hundred thousand of them."""

    def to_wire(self, value: tuple[int, ...]) -> list[int]:
        """Return a list."""
        return list(value)

    def from_wire(self, wire: Any, where: str) -> tuple[int, ...]:
        """Check length, types and range."""
        if not isinstance(wire, list) or len(wire) > MAX_TOKENS:
            raise MalformedMessage(where, f"expected an array of at most {MAX_TOKENS} token ids")
        if not wire:
            return ()
        if len(wire) == 1 and type(wire[0]) is int and 0 <= wire[0] < 2**31:  # a streamed token
            return (wire[0],)
        if set(map(type, wire)) != {int} or min(wire) < 0 or max(wire) >= 2**31:
            raise MalformedMessage(where, "a token id is not an integer in [0, 2**31)")
        return tuple(wire)


class Record:
    """A dataclass as a map by field name: exactly its fields, no more and no fewer."""

    def __init__(self, kind: Callable[..., Any], parts: Mapping[str, Codec[Any]]) -> None:
        self.kind = kind
        self.parts = parts
        self._values = tuple(map(operator.attrgetter, parts))
        self._writers = tuple(codec.to_wire for codec in parts.values())
        self._readers = tuple(codec.from_wire for codec in parts.values())

    def to_wire(self, value: Any) -> dict[str, Any]:
        """Return the map."""
        values = [value_of(value) for value_of in self._values]
        return dict(zip(self.parts, map(operator.call, self._writers, values), strict=True))

    def from_wire(self, wire: Any, where: str) -> Any:
        """Check the names, then each part; a value that its own constructor refuses is malformed too."""
        if not isinstance(wire, dict):
            raise MalformedMessage(where, f"expected a map, got {type(wire).__name__}")
        if wire.keys() != self.parts.keys():
            odd = sorted(map(str, wire.keys() ^ self.parts.keys()))
            raise MalformedMessage(where, f"missing or unknown fields: {', '.join(odd[:5])}")
        try:
            values = map(operator.call, self._readers, map(wire.__getitem__, self.parts), self.parts)
            return self.kind(**dict(zip(self.parts, values, strict=True)))
        except MalformedMessage as error:  # its path is put together here, not for every field that is well
            raise MalformedMessage(f"{where}.{error.where}", error.problem) from None
        except ValueError as error:
            raise MalformedMessage(where, str(error)) from error


class Row:
    """A dataclass as an array of its fields in order, for what is said often. Fields behind the first `num_always`
    that are None are left out at the end of the array, and only there.
    """

    def __init__(self, kind: Callable[..., Any], parts: Mapping[str, Codec[Any]], num_always: int) -> None:
        self._kind = kind
        self._names = tuple(parts)
        self._codecs = tuple(parts.values())
        self._readers = tuple(codec.from_wire for codec in self._codecs)
        self._num_always = num_always
        self._nones = tuple((None,) * num_missing for num_missing in range(len(self._names) - num_always + 1))

    def to_wire(self, value: Any) -> list[Any]:
        """Return the array without the Nones at its end."""
        names = self._names
        while len(names) > self._num_always and getattr(value, names[-1]) is None:
            names = names[:-1]
        return [codec.to_wire(getattr(value, name)) for name, codec in zip(names, self._codecs, strict=False)]

    def from_wire(self, wire: Any, where: str) -> Any:
        """Check the length, then each part."""
        if not isinstance(wire, list):
            raise MalformedMessage(where, f"expected an array, got {type(wire).__name__}")
        num_missing = len(self._names) - len(wire)
        most_missing = len(self._nones) - 1
        if not 0 <= num_missing <= most_missing or (num_missing < most_missing and wire[-1] is None):
            raise MalformedMessage(
                where, f"not {self._num_always} to {len(self._names)} fields without None at the end"
            )
        try:
            known = map(operator.call, self._readers, wire, self._names)  # as long as `wire`; no frame for each
            return self._kind(*known, *self._nones[num_missing])
        except MalformedMessage as error:  # as in Record
            raise MalformedMessage(f"{where}.{error.where}", error.problem) from None
