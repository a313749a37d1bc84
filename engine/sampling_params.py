"""What the user asked of sampling. Torch-free: the gateway, the wire and the engine share it."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, replace
from typing import Any

from pdserve.engine.errors import InvalidRequest
from pdserve.engine.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 1024  # token sequences: a word is up to two of them
MAX_BAD_WORD_TOKENS = 64
BANNING_BIAS = -100.0
MIN_REPETITION_PENALTY = 0.01  # logits that it divides stay finite
MAX_BRANCHES = 128
_SEED_LIMIT = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one prompt; validates itself and names the field that is wrong.

    `n` completions are wanted; with a larger `best_of` as many are made, and those with the highest logprob per token
    are kept. They are branches, each a sequence of its own with a sampling of its own (`branch`: n is 1, best_of None).

    `max_tokens=None` means "up to the context limit"; 0 is allowed with `prompt_logprobs` only: the prompt is scored
    and nothing is sampled. `temperature=0` is greedy. `top_k` of 0 or -1 is off. A `logit_bias` of -100 bans; it may be
    given as a mapping. `bad_words_ids` are token sequences that the output never contains; `bad_words` are texts, for
    `LLM` to make such sequences of. `include_stop_str_in_output` and `skip_special_tokens` say how `LLM` makes text of
    tokens; an engine knows no text. None for a field of several values is none of them. `structured_outputs` is the
    form that the answer has (`guided_decoding` is its older name); where it is complete, the answer ends, whatever
    `min_tokens` and `ignore_eos` say. `speculative=False` forgoes speculative decoding, which changes how fast tokens
    come and nothing else.
    `seed=None` is only allowed before dispatch: whoever accepts the request draws one, so that the tokens are
    a function of (seed, output position) wherever they are computed. A smaller `priority` is served earlier, where the
    scheduling policy is "priority"; elsewhere it must be 0.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    best_of: int | None = None
    speculative: bool = True
    priority: int = 0
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: InitVar[StructuredOutputsParams | None] = None

    def __post_init__(self, guided_decoding: StructuredOutputsParams | None) -> None:
        if guided_decoding is not None:
            object.__setattr__(self, "structured_outputs", guided_decoding)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words"):
            if type(values := getattr(self, name)) is not tuple:
                object.__setattr__(self, name, tuple(values or ()))
        if self.logit_bias != ():  # as most often; a request is copied several times
            pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias or ()
            object.__setattr__(self, "logit_bias", tuple((token_id, bias) for token_id, bias in pairs))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.bad_words_ids != ():
            object.__setattr__(self, "bad_words_ids", tuple(map(tuple, self.bad_words_ids or ())))
        self._check_branches()
        self._check_lengths()
        self._check_distribution()
        self._check_logits()
        self._check_stops()
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidRequest("structured_outputs", "must be StructuredOutputsParams")

    def _check_branches(self) -> None:
        _check_int("n", self.n, 1, MAX_BRANCHES)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, 1, MAX_BRANCHES)
            if self.best_of < self.n:
                raise InvalidRequest("best_of", f"{self.best_of} is less than n, which is {self.n}")

    def _check_lengths(self) -> None:
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _check_int("priority", self.priority, -(2**31), 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}")

    def _check_distribution(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 2.0)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        if self.seed is not None:
            _check_int("seed", self.seed, -_SEED_LIMIT, _SEED_LIMIT - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    def _check_logits(self) -> None:
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10.0)
        _check_count("logit_bias", self.logit_bias, MAX_LOGIT_BIASES)
        for token_id, bias in self.logit_bias:
            _check_int("logit_bias", token_id, 0, 2**31 - 1)
            _check_number("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            _check_count("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids", "must not be empty: nothing could be sampled")
            for token_id in self.allowed_token_ids:
                _check_int("allowed_token_ids", token_id, 0, 2**31 - 1)
        self._check_bad_words()

    def _check_bad_words(self) -> None:
        if not all(isinstance(word, str) and word for word in self.bad_words):
            raise InvalidRequest("bad_words", "each must be a non-empty string")
        _check_count("bad_words", self.bad_words_ids, MAX_BAD_WORDS)
        for token_ids in self.bad_words_ids:
            if not token_ids:
                raise InvalidRequest("bad_words", "each must have a token")
            _check_count("bad_words", token_ids, MAX_BAD_WORD_TOKENS)
            for token_id in token_ids:
                _check_int("bad_words", token_id, 0, 2**31 - 1)
        if self.allowed_token_ids is not None:
            banned = {token_ids[0] for token_ids in self.bad_words_ids if len(token_ids) == 1}
            banned |= {token_id for token_id, bias in self.logit_bias if bias == BANNING_BIAS}
            if banned.issuperset(self.allowed_token_ids):
                raise InvalidRequest("allowed_token_ids", "bad_words and logit_bias ban every one of them")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest("stop", "each stop must be a non-empty string")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, 2**31 - 1)
        for name in ("ignore_eos", "speculative", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(name, f"must be true or false, got {getattr(self, name)!r}")

    @property
    def num_branches(self) -> int:
        """How many sequences are sampled for one prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether more sequences are sampled than are wanted."""
        return self.num_branches > self.n

    def branch(self, index: int, **changes: Any) -> "SamplingParams":
        """Return the sampling of branch `index` by itself, and `changes`; ranked branches have logprobs."""
        logprobs = 0 if self.is_ranked and self.logprobs is None else self.logprobs
        wanted = {"n": 1, "best_of": None, "seed": branch_seed(self.seed, index), "logprobs": logprobs, **changes}
        changed = {name: value for name, value in wanted.items() if getattr(self, name) != value}
        return replace(self, **changed) if changed else self  # as a request of one choice and one prompt has it

    def dispatched(self, seed: int) -> "SamplingParams":
        """Return what nodes are told, who know no text: with a seed, and without stop strings.

        Nothing that was checked can become wrong by that, so nothing is checked again.
        """
        copied: SamplingParams = object.__new__(SamplingParams)
        for name in SamplingParams.__slots__:
            object.__setattr__(copied, name, getattr(self, name))
        object.__setattr__(copied, "seed", seed)
        object.__setattr__(copied, "stop", ())
        return copied

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken: temperature below 1e-5 counts as 0 (it would overflow)."""
        return self.temperature < 1e-5 or self.top_k == 1 or self.top_p == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether what may follow depends on the order of the tokens generated before."""
        return bool(self.bad_words_ids) or self.structured_outputs is not None

    @property
    def has_penalties(self) -> bool:
        """Whether the next token's distribution depends on which tokens came before, in any order."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


def branch_seed(seed: int | None, index: int) -> int | None:
    """Return the seed of branch `index` of a prompt: the request's own for the first, a digest of it for the others.

    Independent of the prompt's position, so that a repeated prompt gives the same branches.
    """
    if seed is None or index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _check_count(field: str, values: tuple[object, ...], most: int) -> None:
    if len(values) > most:
        raise InvalidRequest(field, f"at most {most} entries, got {len(values)}")


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(field, f"must be an integer, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequest(field, f"must be between {low} and {high}, got {value}")


def _check_number(field: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(field, f"must be a finite number, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequest(field, f"must be between {low:g} and {high:g}, got {value:g}")
