"""An event that a stream sends over and over, with only its text changed: encoded once, around the text."""

from pdserve.gateway.stream_event import EncodedEvent, StreamEvent, event_json


class TextFrame:
    """Owns the bytes in front of the text and behind it."""

    PLACE = "\0text\0"  # stands for the text in the event that a frame is made of

    def __init__(self, before: bytes, behind: bytes) -> None:
        self._before = before
        self._behind = behind

    @classmethod
    def of(cls, event: StreamEvent) -> "TextFrame":
        """Return the frame of `event`, which has `TextFrame.PLACE` where its text goes."""
        before, _, behind = event.encoded().rpartition(event_json(cls.PLACE))
        return cls(before, behind)

    def around(self, text: str) -> EncodedEvent:
        """Return the event with `text`, byte for byte as `StreamEvent` would encode it."""
        return EncodedEvent(self._before + event_json(text) + self._behind)
