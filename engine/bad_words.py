"""Words that an answer must not contain, as the token sequences that spell them."""

from collections.abc import Sequence

from pdserve.engine.errors import InvalidRequest
from pdserve.engine.tokenizer import Tokenizer

_MAX_WORDS = 512
_MAX_WORD_CHARS = 256


def bad_words_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word as it stands at the beginning of a text and after a space.

    Raises:
        InvalidRequest: a word has no tokens, or there are too many.
    """
    if len(words) > _MAX_WORDS:
        raise InvalidRequest("bad_words", f"at most {_MAX_WORDS} words, got {len(words)}")
    sequences: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        if len(word) > _MAX_WORD_CHARS:
            raise InvalidRequest(f"bad_words.{index}", f"must have at most {_MAX_WORD_CHARS} characters")
        bare = word.lstrip(" ") or word
        for text in (bare, f" {bare}"):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not token_ids or not bare:
                raise InvalidRequest(f"bad_words.{index}", "must not be empty: this model has no tokens for it")
            sequences[token_ids] = None
    return tuple(sequences)
