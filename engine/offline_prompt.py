"""The forms in which a prompt is given offline: text, token ids, or a mapping that names one of the two."""

import operator
from collections.abc import Iterable, Mapping, Sequence

from pdserve.engine.errors import InvalidRequest
from pdserve.engine.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, object]


def prompt_parts(prompt: Prompt) -> tuple[str | None, Sequence[int] | None]:
    """Return the text and the token ids of a prompt, of which at least one is there.

    Raises:
        InvalidRequest: it is none of these, or a mapping that has neither.
    """
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, _token_ids(prompt)
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise InvalidRequest("prompt", f"must be a text, got {type(text).__name__}")
    if token_ids is None:
        if text is None:
            raise InvalidRequest("prompt", "give a text as `prompt` or token ids as `prompt_token_ids`")
        return text, None
    if not isinstance(token_ids, list | tuple) or not all(type(item) is int for item in token_ids):
        raise InvalidRequest("prompt_token_ids", "must be a list of token ids")
    return text, token_ids


def _token_ids(prompt: object) -> list[int]:
    """Return the ids as ints; numbers of other libraries count as such."""
    expected = f"must be a text, a list of token ids or a mapping, got {type(prompt).__name__}"
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise InvalidRequest("prompt", expected)
    try:
        return [operator.index(token_id) for token_id in prompt]
    except TypeError:
        raise InvalidRequest("prompt", f"{expected} of something else") from None


def split_tokens(prompt: Prompt, continuation: Prompt, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt and of what follows it; two texts are tokenized as one.

    Raises:
        InvalidRequest: the continuation has no token, or there is nothing before it.
    """
    (text, ids), (next_text, next_ids) = prompt_parts(prompt), prompt_parts(continuation)
    before = list(tokenizer.encode(text or "") if ids is None else ids)
    if ids is None and next_ids is None:
        after = tokenizer.encode((text or "") + (next_text or ""))[len(before) :]
    else:
        after = list(tokenizer.encode(next_text or "", add_special_tokens=False) if next_ids is None else next_ids)
    if not after:
        raise InvalidRequest("continuations", "one of them has no token of its own")
    if not before:
        raise InvalidRequest("prompts", "one of them has no token: nothing can be said of a text's very first token")
    return before, list(after)
