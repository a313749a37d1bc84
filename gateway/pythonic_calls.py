"""Calls as Llama 4 and ToolACE write them: the whole answer is a Python list, [name(argument=value), ...]."""

from pdserve.gateway.call_text import CallText, Reading
from pdserve.gateway.python_calls import python_calls

_OPENING_TAG = "<|python_start|>"
_CLOSING_TAG = "<|python_end|>"


class PythonicSyntax:
    """A list begins calls only where nothing was said before, or behind the tag that some versions write."""

    markers: tuple[str, ...] = (_OPENING_TAG,)
    bare: str = "["
    separators: str = ""

    def read(self, text: CallText, marker: str) -> Reading[None]:
        text.position = len(marker) if marker == _OPENING_TAG else 0
        yield from python_calls(text)
        if marker == _OPENING_TAG:
            yield from text.skip(_CLOSING_TAG)
