"""Tokenizes prompts without stalling the event loop; refuses by length alone what cannot fit."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.error_responses import ContextLengthExceeded

_MAX_INLINE_CHARS = 4096  # tokenized in about a millisecond
_NUM_THREADS = 2


class PromptEncoder:
    """Owns the threads that tokenize long texts; `close` when the server has stopped."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    async def encode(
        self,
        text: str,
        field: str,
        max_model_len: int,
        add_special_tokens: bool = True,
        num_kept: int | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of `text`, or its last `num_kept`.

        Raises:
            ContextLengthExceeded: it has more characters than the longest tokens could cover; names `field`.
        """
        least = -(-len(text) // self._tokenizer.max_token_chars)
        if num_kept is None and least > max_model_len:
            raise ContextLengthExceeded(
                field,
                f"this model's maximum context length is {max_model_len} tokens, "
                f"the prompt has at least {least} tokens",
            )
        if len(text) <= _MAX_INLINE_CHARS:
            encoded = self._tokenizer.encode(text, add_special_tokens)
        else:
            loop = asyncio.get_running_loop()
            encoded = await loop.run_in_executor(self._threads, self._tokenizer.encode, text, add_special_tokens)
        return tuple(encoded if num_kept is None else encoded[-num_kept:])

    def close(self) -> None:
        """Stop the threads; texts still waiting are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
