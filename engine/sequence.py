"""One sequence of tokens on its way through an engine. Only the scheduler mutates it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pdserve.engine.block_pool import BlockId
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.step_output import TokenScore
from pdserve.engine.tier_moves import HostSlot
from pdserve.kernels.seen_tokens import SeenTokens


class SequenceStatus(StrEnum):
    """Where a sequence is inside one engine."""

    WAITING = "waiting"  # holds no blocks
    LANDED = "landed"  # holds blocks, arrived or shared, and waits for a place in the batch
    RUNNING = "running"  # scheduled step by step
    FORKING = "forking"  # waits for the prompt that its leader computes; holds nothing
    PENDING = "pending"  # to be imported; holds no blocks yet
    IMPORTING = "importing"  # its prompt's blocks arrive from another node
    EXPORTING = "exporting"  # computed here, its blocks are being shipped to another node
    FINISHED = "finished"  # holds nothing


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What is asked of an engine: immutable, and all that another engine needs to go on with the same sequence.

    `output_token_ids` were sampled elsewhere before; they are computed but not sampled again. With `is_export` the
    sequence stops after the first sampled token and its blocks stay until `release_export`.
    """

    seq_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    salt: str = ""
    output_token_ids: tuple[int, ...] = ()
    is_export: bool = False
    num_candidates: int = 0  # of a beam: as many likeliest next tokens are said, none is taken until `regrow`


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """What a preempted sequence keeps in host memory: its blocks from `first` on, the last one perhaps partial.

    The blocks before them are the prefix tree's. `num_tokens` are computed if all are there again.
    """

    first: int
    slots: tuple[HostSlot, ...]
    num_tokens: int


class Rank(NamedTuple):
    """The order of service: the least is served first, the greatest is preempted first. No two have the same."""

    priority: int
    is_late: bool  # when it was started first, or now if it waits for that: see `LatePrompts`
    arrival: int


_FIRST = Rank(0, False, 0)


class Sequence:
    """Tokens, the blocks that hold their keys and values, and how far the computation has come.

    Tokens [0, num_computed_tokens) have their keys and values in `block_table`; the engine's only job is to let
    `num_computed_tokens` catch up with `num_tokens`, and to sample one token whenever it does. Branches of one prompt
    are a leader, which computes it, and followers, which wait for that; then they share its blocks (`engine/forks.py`).
    """

    __slots__ = (
        "_seen",
        "block_table",
        "followers",
        "is_fetching",
        "is_looked_up",
        "leader",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_inserted_tokens",
        "num_overtaken_tokens",
        "num_prompt_tokens",
        "num_reached_tokens",
        "prompt_scores",
        "queue_s",
        "rank",
        "seq_id",
        "spec",
        "status",
        "swapped",
        "token_ids",
        "waiting_since",
    )

    def __init__(self, spec: SequenceSpec, rank: Rank = _FIRST, now: float = 0.0) -> None:
        self.spec = spec
        self.seq_id = spec.seq_id
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.rank = rank
        self.waiting_since = now
        self.queue_s: float | None = None  # from its arrival until it was started for the first time
        self.num_overtaken_tokens = 0  # of sequences that were started before it although they came after it
        self.token_ids: list[int] = [*spec.prompt_token_ids, *spec.output_token_ids]
        self.block_table: list[BlockId] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # prompt tokens that were never computed here
        self.num_reached_tokens = 0  # the most tokens that ever were computed or cached, before preemptions
        self.num_inserted_tokens = 0  # [0, num_inserted_tokens) are known to the prefix tree
        self.prompt_scores: list[TokenScore] = []  # of the computed prompt tokens after the first
        self.leader: Sequence | None = None  # who computes the prompt for this one; None once it is computed
        self.followers: list[Sequence] = []  # who waits for this one's prompt
        self.status = SequenceStatus.WAITING
        self.is_looked_up = False  # the prefix tree has counted its hits and misses
        self.is_fetching = False  # blocks of it are being read from disk: it waits for them
        self.swapped: SwappedBlocks | None = None  # only while it waits after a preemption
        self._seen: SeenTokens | None = None  # made when they are asked for first

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, here or elsewhere: the output position of the next one."""
        return len(self.token_ids) - self.num_prompt_tokens

    def count_seen(self) -> SeenTokens:
        """Return what penalties are of, up to the last token known; counted on from where it was asked for last."""
        if self._seen is None:
            penalizes_prompt = self.spec.sampling.repetition_penalty != 1
            self._seen = SeenTokens(self.spec.prompt_token_ids if penalizes_prompt else ())
        self._seen.add(self.token_ids[self.num_prompt_tokens + self._seen.num_generated :])
        return self._seen

    @property
    def is_prompt_scored(self) -> bool:
        """Whether prompt logprobs are wanted and still to be said: they go out with the first output token."""
        return self.spec.sampling.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are still missing."""
        return len(self.token_ids) - self.num_computed_tokens
