"""One call as a JSON object with `name` and `arguments` (or `parameters`)."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from pdserve.gateway.call_text import CallText, MalformedCall, Reading
from pdserve.gateway.json_values import json_object, json_value

_ARGUMENTS = ("arguments", "parameters")


def json_call(text: CallText, needs_arguments: bool = False) -> Reading[None]:
    """Tell the call that comes next. Its arguments are told as they come if the name stands before them.

    Raises:
        MalformedCall: there is no call of a known function, or not from here on.
    """
    name: str | None = None
    arguments: str | None = None  # as JSON text, for a name that comes later
    is_told = False
    yield from text.expect("{")
    while (yield from text.peek()) != "}":
        key = load_json((yield from _captured(text)))
        yield from text.expect(":")
        is_object = (yield from text.peek()) == "{"
        if key in _ARGUMENTS and is_object and name is not None and arguments is None and not is_told:
            text.open(name)
            yield from json_object(text)
            text.close()
            is_told = True
        elif key in _ARGUMENTS and arguments is None:
            arguments = yield from _captured(text)
        elif key == "name" and not is_told:
            name = text.known(load_json((yield from _captured(text))))
        else:
            yield from _captured(text)
        if (yield from text.peek()) == ",":
            text.position += 1
        elif (yield from text.peek()) != "}":
            raise MalformedCall("neither a comma nor the end")
    text.position += 1
    if not is_told:
        _tell_whole(text, name, arguments, needs_arguments)
    text.settle()


def json_calls(text: CallText) -> Reading[None]:
    """Tell the list of calls that comes next; one at least."""
    yield from text.expect("[")
    while True:
        yield from json_call(text)
        if (yield from text.peek()) == "]":
            text.position += 1
            return
        yield from text.expect(",")


def load_json(text: str) -> Any:
    """Return the value of strict JSON.

    Raises:
        MalformedCall: it is none.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(str(error)) from None


def _tell_whole(text: CallText, name: str | None, arguments: str | None, needs_arguments: bool) -> None:
    if name is None or (arguments is None and needs_arguments):
        raise MalformedCall("not an object with a name and arguments")
    value = {} if arguments is None else load_json(arguments)
    if isinstance(value, str):
        value = load_json(value)  # some models write them as a text
    if not isinstance(value, dict):
        raise MalformedCall("the arguments are not an object")
    shown = _shown(value)
    text.open(name)
    text.tell(shown)
    text.close()


def _shown(arguments: Mapping[str, Any]) -> str:
    """Return `arguments` as JSON text that every reader takes: no infinite number, no half of a surrogate pair."""
    try:
        shown = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        shown.encode()
    except ValueError as error:
        raise MalformedCall(str(error)) from None
    return shown


def _captured(text: CallText) -> Reading[str]:
    yield from text.peek()
    with text.captured() as captured:
        yield from json_value(text)
    return captured[0]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
