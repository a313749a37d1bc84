"""Tells what a model thinks, between <think> and </think> at the beginning of its answer, from what it says."""

from pdserve.gateway.answer_part import AnswerPart, Thought

OPENING_TAG = "<think>"
CLOSING_TAG = "</think>"


class ThinkReader:
    """Splits off the thoughts; `push` returns the text behind them, for another reader.

    With `is_open` the prompt has opened them already. White space around thoughts, and behind the closing tag, is left
    out. Thoughts that are never closed are thoughts.
    """

    def __init__(self, is_open: bool) -> None:
        self.is_thinking = is_open
        self._is_before = not is_open
        self._skips_space = False
        self._has_thought = False
        self._held = ""

    def push(self, text: str) -> tuple[list[AnswerPart], str]:
        """Return the thoughts in `text`, and what is behind them."""
        if not self.is_thinking and not self._is_before:
            return [], self._behind(text)
        self._held += text
        if self._is_before and not self._open():
            return [], self._take_held() if not self._is_before else ""
        thoughts, tag, rest = self._held.partition(CLOSING_TAG)
        if not tag:
            return self._think(), ""
        self._held = ""
        self.is_thinking = False
        self._skips_space = True
        return self._thoughts(thoughts.rstrip()), self._behind(rest)

    def finish(self) -> tuple[list[AnswerPart], str]:
        """Return the last thoughts, or what is behind them."""
        held = self._take_held()
        return (self._thoughts(held), "") if self.is_thinking else ([], held)

    def _open(self) -> bool:
        """Whether the answer has begun with thoughts; decides that it has not as soon as that is certain."""
        text = self._held.lstrip()
        if text.startswith(OPENING_TAG):
            self._is_before, self.is_thinking = False, True
            self._held = text[len(OPENING_TAG) :]
        elif not OPENING_TAG.startswith(text):
            self._is_before = False
        return self.is_thinking

    def _think(self) -> list[AnswerPart]:
        """Tell the thoughts that are certain; what may begin the closing tag, and white space before it, is held."""
        sizes = range(len(CLOSING_TAG) - 1, -1, -1)
        size = next(size for size in sizes if self._held.endswith(CLOSING_TAG[:size]))
        certain = self._held[: len(self._held) - size].rstrip()
        self._held = self._held[len(certain) :]
        return self._thoughts(certain)

    def _thoughts(self, text: str) -> list[AnswerPart]:
        shown = text if self._has_thought else text.lstrip()
        self._has_thought = self._has_thought or bool(shown)
        return [Thought(shown)] if shown else []

    def _behind(self, text: str) -> str:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return text

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held
