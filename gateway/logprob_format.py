"""Logprobs in the shapes of the two endpoints. A token is shown as its text, else as its bytes."""

from collections.abc import Sequence

from pdserve.control.messages import TokenLogprobs
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.reply_types import (
    ChatLogprobsReply,
    CompletionLogprobsReply,
    PromptScores,
    TokenEntry,
    TokenWithTop,
)
from pdserve.gateway.shown_token import ShownToken

_LEAST_LOGPROB = -9999.0  # JSON has no -Infinity


def completion_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> CompletionLogprobsReply:
    """Return `{tokens, token_logprobs, top_logprobs, text_offset}`; top lists hold the token itself.

    A token that follows nothing, the first one of an echoed prompt, has null in both lists of logprobs.
    """
    return {
        "tokens": [_token_text(token.token_id, tokenizer) for token in tokens],
        "token_logprobs": [None if token.logprobs is None else _finite(token.logprobs.logprob) for token in tokens],
        "top_logprobs": [
            None if token.logprobs is None else _top_by_text(token.token_id, token.logprobs, tokenizer)
            for token in tokens
        ],
        "text_offset": [token.text_offset for token in tokens],
    }


def chat_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> ChatLogprobsReply:
    """Return `{content: [{token, bytes, logprob, top_logprobs}]}`."""
    content: list[TokenWithTop] = [
        {
            **_entry(token.token_id, token.logprobs.logprob, tokenizer),
            "top_logprobs": [_entry(token_id, logprob, tokenizer) for token_id, logprob in token.logprobs.top],
        }
        for token in tokens
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(token_ids: Sequence[int], scores: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> PromptScores:
    """Return one entry a prompt token, as vLLM does: by token id its logprob, rank and text; null for the first.

    The prompt's own token comes first; its rank is null where it is not among the alternatives.
    """
    entries: PromptScores = [None]
    for token_id, score in zip(token_ids[1:], scores, strict=True):
        ranks = {top_id: rank for rank, (top_id, _) in enumerate(score.top, start=1)}
        values = {token_id: score.logprob, **dict(score.top)}
        entries.append(
            {
                str(each): {
                    "logprob": _finite(logprob),
                    "rank": ranks.get(each),
                    "decoded_token": _token_text(each, tokenizer),
                }
                for each, logprob in values.items()
            }
        )
    return entries


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> TokenEntry:
    return {
        "token": _token_text(token_id, tokenizer),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _top_by_text(token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    top: dict[str, float] = {}
    for top_id, logprob in (*logprobs.top, (token_id, logprobs.logprob)):
        top.setdefault(_token_text(top_id, tokenizer), _finite(logprob))
    return top


def _token_text(token_id: int, tokenizer: Tokenizer) -> str:
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB) if logprob == logprob else _LEAST_LOGPROB
