"""Where one answer stands in its grammar: which tokens may follow, one step on, any number of steps back.

Wraps llguidance's matcher (an Earley parser over a lexer of derivatives); knows token ids and bytes, no tensors.
"""

from collections.abc import Sequence
from contextlib import suppress

from llguidance import LLMatcher

from pdserve.engine.errors import GrammarFailed


class GrammarState:
    """A position in a grammar. Not thread-safe: whoever owns it asks from one thread at a time.

    Speculation: `masks` looks ahead along a draft and comes back, `rollback` undoes accepted tokens, and a `fork` goes
    its own way from the same position. A state depends on the accepted tokens alone, not on how it came by them.
    """

    __slots__ = ("_is_over", "_matcher", "_token_ids")

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._token_ids: list[int] = []

    @property
    def token_ids(self) -> Sequence[int]:
        """The accepted tokens."""
        return self._token_ids

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    @property
    def is_over(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> bytes:
        """Return one bit a token id, lowest first: whether it may follow.

        An end-of-sequence id may follow where the answer may end.

        Raises:
            GrammarFailed: the grammar is too complex to go on with, or has come to a dead end.
        """
        mask = self._matcher.compute_bitmask()
        self._check()
        if self._matcher.is_stopped() and not self._matcher.is_accepting():
            raise GrammarFailed("the grammar has come to a place where no text can follow")
        return mask

    def masks(self, draft_token_ids: Sequence[int]) -> list[bytes]:
        """Return the mask here and after each token of a draft, as far as the grammar goes along with it.

        Raises:
            GrammarFailed: there is none here, as for `mask`.
        """
        masks = [self.mask()]
        ahead = self.fork()  # may fail without this state being the worse for it
        with suppress(GrammarFailed):
            for token_id in draft_token_ids:
                if ahead.is_over or not is_allowed(masks[-1], token_id):
                    break
                ahead.accept(token_id)
                masks.append(ahead.mask())
        return masks

    def accept(self, token_id: int) -> None:
        """Go one token on.

        Raises:
            GrammarFailed: it may not follow here.
        """
        if self.is_over or not self._matcher.consume_token(token_id):
            self._check()
            raise GrammarFailed(f"token {token_id} may not follow here")
        self._token_ids.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens.

        Raises:
            GrammarFailed: the matcher cannot.
        """
        assert 0 <= num_tokens <= len(self._token_ids)
        if num_tokens == 0:
            return
        if not self._matcher.rollback(num_tokens):
            self._check()
        del self._token_ids[len(self._token_ids) - num_tokens :]

    def move_to(self, token_ids: Sequence[int]) -> None:
        """Stand after exactly `token_ids`, going back and on as needed.

        Raises:
            GrammarFailed: they are no beginning of an answer.
        """
        num_common = 0
        for ours, theirs in zip(self._token_ids, token_ids, strict=False):
            if ours != theirs:
                break
            num_common += 1
        self.rollback(len(self._token_ids) - num_common)
        for token_id in token_ids[num_common:]:
            self.accept(token_id)

    def fork(self) -> "GrammarState":
        """Return an independent state at the same position."""
        other = GrammarState(self._matcher.deep_copy())
        other._token_ids = list(self._token_ids)
        return other

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(reason(self._matcher.get_error()))


def is_allowed(mask: bytes, token_id: int) -> bool:
    """Whether `mask` has the bit of `token_id`."""
    byte = token_id >> 3
    return 0 <= byte < len(mask) and bool(mask[byte] >> (token_id & 7) & 1)


def reason(message: str) -> str:
    """Return what a message of the library says, on one line of bounded length."""
    if message.startswith("NoExtension"):
        return "no text can have this form"
    if message.startswith("panic"):
        return "this model's tokenizer has no tokens for a text that the grammar demands"
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line[:300] or "the grammar cannot be followed"
