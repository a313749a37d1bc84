"""Compiles what a request asks for into grammars over one tokenizer's vocabulary, and keeps the last ones.

Torch-free: a gateway compiles to refuse before anything is promised, a node to sample. Compiling recurses as deep as
the grammar does, so it belongs into the thread of `grammar_thread`.
"""

from collections import OrderedDict

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pdserve.engine.errors import GrammarFailed
from pdserve.engine.grammar_source import grammar_source
from pdserve.engine.grammar_state import GrammarState, reason
from pdserve.engine.structured_outputs import StructuredOutputsParams
from pdserve.engine.tokenizer import Tokenizer

_MAX_KEPT = 64
_NEEDED_BYTES = frozenset(range(0x20, 0x7F)) | frozenset(b"\n")
# Work in lexer and parser is counted, not timed, so that every machine refuses the same grammars: well below a second.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=250_000,
    step_lexer_fuel=200_000,
    step_max_items=500_000,
    max_items_in_row=5_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class GrammarCompiler:
    """Grammars of one vocabulary; not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids
        self._vocabulary = _Vocabulary(tokenizer, eos_ids)
        self._tokens: LLTokenizer | None = None  # a trie over the vocabulary, made for the first grammar
        self._kept: OrderedDict[StructuredOutputsParams, GrammarState] = OrderedDict()

    def state(self, params: StructuredOutputsParams) -> GrammarState:
        """Return a new state at the beginning of the grammar of `params`.

        Raises:
            GrammarFailed: it cannot be compiled, or no answer can have this form.
        """
        start = self._kept.get(params)
        if start is None:
            start = self._kept[params] = self._compile(params)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(params)
        return start.fork()

    def drop(self, params: StructuredOutputsParams) -> None:
        """Compile `params` anew when it is asked for again.

        Forks share a lexer, whose states are limited in number: after many long answers they may be used up.
        """
        self._kept.pop(params, None)

    def _compile(self, params: StructuredOutputsParams) -> GrammarState:
        if not self._eos_ids:
            raise GrammarFailed("this model has no end-of-sequence token, with which a structured answer could end")
        if self._tokens is None:
            if not self._vocabulary.can_spell:
                raise GrammarFailed("this model's tokenizer cannot spell every text, so no form can be held to")
            wrapper = TokenizerWrapper(self._vocabulary)
            self._tokens = LLTokenizer(wrapper, n_vocab=len(self._vocabulary.tokens), eos_token=sorted(self._eos_ids))
        matcher = LLMatcher(self._tokens, grammar_source(params), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarFailed(reason(matcher.get_error()))
        state = GrammarState(matcher)
        for _ in range(2):  # forks share a lexer and its limits: what the first one used up, the second one lacks
            if not any(state.fork().mask()):
                raise GrammarFailed("no text can have this form")
        return state


class _Vocabulary:
    """What llguidance asks of a tokenizer: the bytes of each token, and how a text is split into them."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> None:
        ids = range(max(tokenizer.vocab_size, max(eos_ids, default=0) + 1))
        self.eos_token_id = min(eos_ids, default=0)
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in ids]
        self.special_token_ids = [token_id for token_id in ids if tokenizer.is_special(token_id) or token_id in eos_ids]
        special = set(self.special_token_ids)
        self._ids = {token: token_id for token_id, token in enumerate(self.tokens) if token and token_id not in special}
        self._max_bytes = max(map(len, self._ids), default=1)
        self._tokenizer = tokenizer

    @property
    def can_spell(self) -> bool:
        """Whether texts can be put together byte by byte; vocabularies of words alone cannot."""
        return all(bytes([value]) in self._ids for value in _NEEDED_BYTES)

    def __call__(self, text: bytes) -> list[int]:
        """Split `text`, which a grammar leaves no choice about.

        As the tokenizer does, unless its tokens spell something else (SentencePiece puts a space in front); then by the
        longest tokens. All of `text` must be covered: llguidance would lose the rest of it.
        """
        token_ids = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)
        if b"".join([self.tokens[token_id] for token_id in token_ids]) == text:
            return token_ids
        token_ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._max_bytes), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                raise ValueError("no token spells this")  # ends this grammar's state with an error, and nothing else
            token_ids.append(self._ids[text[start:end]])
            start = end
        return token_ids
