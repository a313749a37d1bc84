"""All that processes say to each other on the control plane: a tagged, versioned union over msgpack.

A message on the wire is one msgpack array `[version, tag, fields]`. Fields are a map by name; an unknown tag,
an unknown version, a missing or a wrongly typed field is a `MessageError`, never a crash of the receiver's
loop.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.step_output import FinishReason as FinishReason
from pdserve.engine.tier_moves import Tier as Tier
from pdserve.kvtransfer.latency import LATENCY_BOUNDS_S as LATENCY_BOUNDS_S

PROTOCOL_VERSION = 9
OTHER_PEERS = "others"  # a peer in PeerCounts that stands for all that have no row


class NodeRole(StrEnum):
    """What a node was started as."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Where the KV blocks of a node are: free + cached + in_use + in_flight == total."""

    total: int
    free: int
    cached: int
    in_use: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """What a node has moved since it started; `open` is the number of transfers not yet at an end."""

    bytes_sent: int
    bytes_received: int
    blocks_sent: int
    blocks_skipped: int
    open: int


@dataclass(frozen=True, slots=True)
class DurationCounts:
    """How many durations fell into each bucket of LATENCY_BOUNDS_S and the one beyond; their sum."""

    buckets: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, slots=True)
class PeerCounts:
    """What a node has moved to and from one peer, why transfers failed, and how long their stages took.

    `failures` counts by cause; `lease_expiries` counts peers that did not answer and is not among them. `first_block`
    is the time from the grant to the first block, `tail` that from the last word of the sender to the acknowledgement.
    """

    peer: str  # a node id; OTHER_PEERS: the rest, and strangers
    bytes_sent: int
    bytes_received: int
    bytes_per_s: float  # of the last seconds
    blocks_sent: int
    blocks_received: int
    blocks_skipped: int
    blocks_refused: int
    blocks_converted: int
    blocks_compressed: int
    bytes_shared: int  # of those sent or received: through memory shared with the peer
    shared_memory_failures: int
    open: int
    completed: int
    lease_expiries: int
    failures: tuple[tuple[str, int], ...]
    offer_to_grant: DurationCounts
    first_block: DurationCounts
    tail: DurationCounts


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Tokens that a node has drafted since its start, and those of them that were right."""

    method: str
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class TierCounts:
    """One tier of a node's KV blocks: what is there, what it can hold, and what lookups found (see `TierUsage`)."""

    tier: Tier
    blocks: int
    max_blocks: int
    bytes: int
    hits: int
    misses: int
    corrupt: int


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """What a node last said of its load; the router decides from these.

    `waiting_tokens` counts prompt tokens not yet computed. `prefill_tokens_per_s` is None until measured.
    `speculation` is None where the node never speculates. `preemptions` counts sequences that had to give their blocks
    away, `swaps` those of them that kept some in host memory. `malformed` counts control messages that it could not
    read, `refused_connections` peers on the control plane without a trusted key.
    `progress_age_s` is the time since the engine last finished a step while it had work (0 when idle).
    """

    ready: bool
    running: int
    waiting: int
    waiting_tokens: int
    prefill_tokens_per_s: float | None
    progress_age_s: float
    blocks: BlockCounts
    transfer: TransferCounts
    speculation: SpeculationCounts | None = None
    tiers: tuple[TierCounts, ...] = ()
    preemptions: int = 0
    swaps: int = 0
    peers: tuple[PeerCounts, ...] = ()
    malformed: int = 0
    refused_connections: int = 0


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Who a node is: in the registry and in every Pong. A restarted node has a new incarnation."""

    node_id: str
    role: NodeRole
    incarnation: str
    control_endpoint: str  # tcp://host:port of the control ROUTER
    transfer_endpoint: str | None  # tcp://host:port of the KV plane; None on a prefill node
    model_name: str
    model_digest: str  # KVLayout.digest(): both ends of a transfer must agree on it
    max_model_len: int  # tokens, prompt + output
    block_size: int  # tokens
    num_blocks: int
    version: str
    events_endpoint: str | None = None  # KV events: the PUB socket; None where they are not published
    events_replay_endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """One more branch of a task's prompt: alike in all but its attempt and its seed."""

    attempt_id: str
    seed: int


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """One sequence to generate, as both node roles receive it; with `forks` several, of one prompt computed once.

    `output_token_ids` are tokens already emitted by an earlier attempt (migration): they are computed, not
    sampled again, and the next sampled token has output position len(output_token_ids). `sampling.seed` is
    never None here. `eos` is the model's own business: nodes know it. Stop strings are the gateway's: nodes
    ignore them.
    """

    request_id: str
    attempt_id: str  # unique for each dispatch of each choice; the key of everything the nodes hold
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    timeout_s: float  # seconds from receipt after which the node gives the attempt up by itself
    forks: tuple[Fork, ...] = ()

    @property
    def attempt_ids(self) -> tuple[str, ...]:
        """The attempts of all branches, this task's own first: the order of the hand-over."""
        return (self.attempt_id, *(fork.attempt_id for fork in self.forks))


# gateway -> node


@dataclass(frozen=True, slots=True)
class Ping:
    """Sent by a gateway about every second; a node drops the work of a gateway that falls silent."""

    gateway_id: str
    sequence: int


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """Compute the prompt, emit the first token, ship the blocks to `decode_endpoint` under `transfer_id`."""

    task: GenerationTask
    transfer_id: str
    decode_endpoint: str
    decode_node_id: str
    decode_incarnation: str


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """Generate the sequence. With a `transfer_id`, its prompt's blocks (and first token) arrive on the KV
    plane; with None the node computes the prompt itself (local prefill).
    """

    task: GenerationTask
    transfer_id: str | None


@dataclass(frozen=True, slots=True)
class CancelTask:
    """Free everything held for `attempt_id`; idempotent, unknown ids are ignored. No reply."""

    attempt_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeLink:
    """Measure the KV plane from this prefill node to a decode node, with `size_bytes` that are nobody's."""

    probe_id: str
    decode_endpoint: str
    decode_node_id: str
    decode_incarnation: str
    size_bytes: int
    timeout_s: float


# node -> gateway


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to Ping. `attempt_ids` is all that the node holds for this gateway: either side can see what
    the other has forgotten.
    """

    sequence: int
    info: NodeInfo
    load: NodeLoad
    attempt_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprob of a sampled token and the top alternatives, most likely first: (token id, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class TokenChunk(NamedTuple):
    """Tokens [start, start + len(token_ids)) of the output; the last chunk of an attempt has a finish_reason.

    A token that ends the sequence by being EOS or a stop id is included in `token_ids` (it counts as usage,
    it has no text). Chunks of one attempt may come from two nodes and overtake each other: `start` orders
    them. `prompt_logprobs`, where asked for, are those of all prompt tokens after the first: they come with
    the first token, or with the end of a sequence that wanted none. `queue_s`, set by whoever computed the prompt in
    its first chunk, is how long the sequence waited in the node's engine before its computation began.

    What is made anew for every token is a NamedTuple: a frozen dataclass takes four times as long to make.
    """

    attempt_id: str
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    num_cached_tokens: int | None  # prompt tokens not computed; set by whoever computed the prompt, else None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    queue_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What one step of a node's engine has made for one gateway: chunks of any attempts, each attempt's in order."""

    chunks: tuple[TokenChunk, ...]


class Stage(StrEnum):
    """Milestones that a node reports."""

    PREFILLING = "prefilling"  # the first chunk of the prompt is scheduled
    TRANSFERRING = "transferring"  # the decode node granted, blocks are moving
    DECODING = "decoding"  # the decode node owns the sequence


@dataclass(frozen=True, slots=True)
class StageReport:
    """An attempt has reached a stage; informs the request record, decides nothing."""

    attempt_id: str
    stage: Stage


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The terminal word of a node about an attempt it cannot finish. `retryable`: another node might."""

    attempt_id: str
    # invalid_request | no_blocks | transfer_failed | deadline | overloaded | draining |
    # queue_timeout | engine_error
    code: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What a probe found out. `code` is None where the link is sound; else `field` may name what differs between the
    ends. Durations are of the prefill node's own clock; `connect_s` is None where it was connected before."""

    probe_id: str
    code: str | None
    message: str
    field: str | None = None
    connect_s: float | None = None
    round_trip_s: float | None = None
    bytes_per_s: float | None = None
    is_encrypted: bool = False
    shares_memory: bool = False  # blocks go through shared memory; the figures are of the socket beside it


ToNode = Ping | PrefillTask | DecodeTask | CancelTask | ProbeLink
ToGateway = Pong | TokenBatch | StageReport | TaskFailed | LinkReport
Message = ToNode | ToGateway
