"""Calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one in each block."""

from pdserve.gateway.call_text import CallText, Reading
from pdserve.gateway.json_calls import json_call


class HermesSyntax:
    """The closing tag may be missing, the object may not."""

    markers: tuple[str, ...] = ("<tool_call>",)
    bare: str = ""
    separators: str = ""

    def read(self, text: CallText, marker: str) -> Reading[None]:
        text.position = len(marker)
        yield from json_call(text)
        yield from text.skip("</tool_call>")
