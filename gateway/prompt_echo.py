"""The prompt as `echo` shows it in front of an answer: its text and, with logprobs, its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.control.messages import TokenLogprobs
from pdserve.engine.detokenizer import IncrementalDetokenizer
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.shown_token import ShownToken


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """What of a prompt is shown. The first token follows nothing: it has no logprob."""

    text: str
    tokens: tuple[ShownToken, ...]

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        text: str | None,
        logprobs: Sequence[TokenLogprobs] | None,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
    ) -> "PromptEcho":
        """Return the echo of a prompt; `text` is None for one that came as token ids."""
        if logprobs is None:
            return cls(tokenizer.decode(token_ids, skip_special_tokens) if text is None else text, ())
        detokenizer = IncrementalDetokenizer(tokenizer, (), skip_special_tokens)
        decoded, tokens = "", []
        for token_id, scored in zip(token_ids, (None, *logprobs), strict=True):
            tokens.append(ShownToken(token_id, len(decoded), scored))
            decoded += detokenizer.push(token_id)
        return cls(decoded + detokenizer.finish() if text is None else text, tuple(tokens))
