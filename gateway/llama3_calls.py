"""Calls as Llama 3 writes them: the whole answer is {"name": ..., "parameters": {...}}, several with `;` between."""

from pdserve.gateway.call_text import CallText, Reading
from pdserve.gateway.json_calls import json_call

_TAG = "<|python_tag|>"


class Llama3JsonSyntax:
    """An object begins a call only where nothing was said before, or behind the tag that some versions write."""

    markers: tuple[str, ...] = (_TAG,)
    bare: str = "{"
    separators: str = ";,"

    def read(self, text: CallText, marker: str) -> Reading[None]:
        text.position = len(marker) if marker == _TAG else 0
        yield from json_call(text, needs_arguments=True)
