"""One server-sent event: JSON data, with a name where the protocol has names."""

from dataclasses import dataclass

import orjson

_FURTHER_LINE_ENDS = (("\x85", b"\\u0085"), ("\u2028", b"\\u2028"), ("\u2029", b"\\u2029"))


def event_json(value: object) -> bytes:
    """Return `value` as JSON in one line by everybody's count.

    Server-sent events end lines at CR and LF alone, but clients cut them as Unicode does (httpx's `iter_lines`).
    """
    content = orjson.dumps(value)
    if not content.isascii():
        for character, escape in _FURTHER_LINE_ENDS:
            content = content.replace(character.encode(), escape)
    return content


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """`name` is the SSE event type, or None for a plain `data:` event."""

    data: object
    name: str | None = None

    def encoded(self) -> bytes:
        """Return the event as it goes over the wire."""
        head = b"" if self.name is None else b"event: " + self.name.encode() + b"\n"
        return head + b"data: " + event_json(self.data) + b"\n\n"


class EncodedEvent:
    """One or more events as they go over the wire."""

    __slots__ = ("_content",)

    def __init__(self, content: bytes) -> None:
        self._content = content

    def encoded(self) -> bytes:
        """Return the content."""
        return self._content


AnyEvent = StreamEvent | EncodedEvent
END_OF_STREAM = EncodedEvent(b"data: [DONE]\n\n")  # the last event of OpenAI's streams, complete or failed
