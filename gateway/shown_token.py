"""A token of a choice as a client sees it, prompt or output."""

from typing import NamedTuple

from pdserve.control.messages import TokenLogprobs


class ShownToken(NamedTuple):
    """A token whose text has been shown; `text_offset` counts the characters in front of it."""

    token_id: int
    text_offset: int
    logprobs: TokenLogprobs | None
