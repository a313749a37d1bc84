"""Calls as Mistral's models write them behind [TOOL_CALLS]: a list of objects, or (since 2025) name[ARGS]{...}."""

import re

from pdserve.gateway.call_text import CallText, MalformedCall, Reading
from pdserve.gateway.json_calls import json_calls
from pdserve.gateway.json_values import json_object

_HEAD = re.compile(r"([A-Za-z0-9_-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]{1,32})?(?:\[ARGS\])?\s{0,8}")
_PART_OF_HEAD = re.compile(r"[\w\s\[\]-]*")


class MistralSyntax:
    """Each marker begins a list or one named call."""

    markers: tuple[str, ...] = ("[TOOL_CALLS]",)
    bare: str = ""
    separators: str = ""

    def read(self, text: CallText, marker: str) -> Reading[None]:
        text.position = len(marker)
        if (yield from text.peek()) == "[":
            yield from json_calls(text)
            return
        head = _HEAD.fullmatch((yield from text.word(_PART_OF_HEAD)))
        if head is None or (yield from text.peek()) != "{":
            raise MalformedCall("neither a list nor a name")
        text.open(text.known(head.group(1)))
        yield from json_object(text)
        text.close()
