"""Token ids in, text out, piece by piece: join(pieces) is what the tokenizer decodes from all ids at once.

A piece is held back while the next token could still change it (an unfinished character).
"""

import codecs
from collections.abc import Sequence

from pdserve.engine.tokenizer import Tokenizer

_REPLACEMENT = "�"
_MAX_HELD_TOKENS = 16
_MAX_CONTEXT_TOKENS = 16


class IncrementalDetokenizer:
    """Text of one growing sequence of token ids; the work for each token does not depend on the length.

    `context_token_ids` is the prompt: its last visible token decides, for vocabularies that keep spaces at
    the front of words, whether the text begins with one.
    """

    def __init__(
        self, tokenizer: Tokenizer, context_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._text: _ByteLevelText | _WindowText
        if tokenizer.is_byte_level:
            self._text = _ByteLevelText(tokenizer)
        else:
            tail = context_token_ids[-_MAX_CONTEXT_TOKENS:]
            self._text = _WindowText(tokenizer, [token_id for token_id in tail if self._is_visible(token_id)][-1:])

    def push(self, token_id: int) -> str:
        """Return the text that is certain with `token_id`, maybe empty."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._text.push(token_id)

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain with all of `token_ids`."""
        if len(token_ids) == 1:  # a streamed token
            return self.push(token_ids[0])
        return "".join([self.push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Return what was held back; an unfinished character becomes U+FFFD. Nothing may be pushed after."""
        return self._text.finish()

    def _is_visible(self, token_id: int) -> bool:
        return not (self._skip_special_tokens and self._tokenizer.is_special(token_id))


class _ByteLevelText:
    """Every token is bytes; only the tail of an unfinished UTF-8 character is held."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_open = False  # in the middle of a character

    def push(self, token_id: int) -> str:
        if not self._is_open and (text := self._tokenizer.whole_text(token_id)) is not None:
            return text
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._is_open = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowText:
    """Any other decoder: decode the held tokens behind one token of context, and keep what the context adds.

    A run of byte tokens is held until it ends, since one bad byte changes the text of the whole run.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._context = [token_id for token_id in context if not tokenizer.is_byte_fallback(token_id)]
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if not self._tokenizer.token_bytes(token_id):
            return ""
        self._held.append(token_id)
        return "" if self._tokenizer.is_byte_fallback(token_id) else self._release(is_last=False)

    def finish(self) -> str:
        return self._release(is_last=True) if self._held else ""

    def _release(self, is_last: bool) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        text = self._tokenizer.decode(self._context + self._held, skip_special_tokens=False)
        is_open = text.endswith(_REPLACEMENT) or not text.startswith(before)
        if is_open and not is_last and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        self._context = self._held[-1:]
        self._held = []
        return text.removeprefix(before)
