"""Stop strings over streamed text: what may be shown, and where the text ends. Knows text, not tokens.

The match that is completed first wins (of two completed by one character, the longer), as if the text came
one character at a time: the answer does not depend on how it was cut into pieces.
"""

from collections.abc import Sequence


class StopChecker:
    """Holds back only the longest suffix that is the beginning of a stop string.

    Each stop string has a Knuth-Morris-Pratt state: how many of its characters the text now ends with. The
    longest of these is what is held.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._fallbacks = tuple(_fallbacks(stop) for stop in self._stops)
        self._lengths = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, can_match: bool = True) -> str:
        """Return what may be shown now that `text` has come; nothing comes after `matched` is set.

        With `can_match` False (at most min_tokens tokens so far) a stop completed in `text` is plain text.
        """
        if self.matched is not None or not self._stops:
            return text if self.matched is None else ""
        for position, char in enumerate(text):
            if (stop := self._advance(char, can_match)) is not None:
                self.matched = stop
                shown = self._held + text[: position + 1]
                self._held = ""
                return shown if self._include_stop else shown[: len(shown) - len(stop)]
        self._held += text
        cut = len(self._held) - max(self._lengths)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """Return what was held back: the text has ended without a stop string."""
        shown, self._held = self._held, ""
        return shown

    def _advance(self, char: str, can_match: bool) -> str | None:
        """Take one character in every state; return the longest stop string that it completes."""
        found: str | None = None
        for index, (stop, fallback) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            length = self._lengths[index]
            while length and stop[length] != char:
                length = fallback[length]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                if can_match and (found is None or len(stop) > len(found)):
                    found = stop
                length = fallback[length]
            self._lengths[index] = length
        return found


def _fallbacks(stop: str) -> tuple[int, ...]:
    """Return, for each number of matched characters, the longest shorter match that they end with."""
    fallbacks = [0, 0]
    length = 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = fallbacks[length]
        if stop[length] == char:
            length += 1
        fallbacks.append(length)
    return tuple(fallbacks)
