"""Compiles the forms that requests ask for, off the event loop: what cannot be held to is refused before the 200."""

import asyncio

from pdserve.engine.errors import GrammarFailed, InvalidRequest
from pdserve.engine.grammar_compiler import GrammarCompiler
from pdserve.engine.grammar_thread import grammar_thread
from pdserve.engine.structured_outputs import StructuredOutputsParams
from pdserve.engine.tokenizer import Tokenizer
from pdserve.gateway.structured_fields import AskedForm

_TIMEOUT_S = 30.0  # the compiler's own limits end it within a second; what waits for others may take longer


class GrammarChecker:
    """Owns the thread that compiles; `close` when the server has stopped."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiler: GrammarCompiler | None = None
        self._thread = grammar_thread("grammar-check")

    async def check(self, asked: AskedForm | None) -> None:
        """Compile what a request asks for, if anything.

        Raises:
            InvalidRequest: it cannot be compiled, no answer can have this form, or it takes too long; names the field.
        """
        if asked is None:
            return
        compiling = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, asked.params)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await compiling
        except GrammarFailed as error:
            raise InvalidRequest(asked.field, str(error)) from None
        except TimeoutError:
            raise InvalidRequest(asked.field, f"could not be compiled within {_TIMEOUT_S:g} s") from None

    def close(self) -> None:
        """Stop the thread; what still waits is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, params: StructuredOutputsParams) -> None:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._tokenizer, self._tokenizer.eos_token_ids)
        self._compiler.state(params)
