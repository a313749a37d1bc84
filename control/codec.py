"""Messages to bytes and back: `[version, tag, fields]` in msgpack, every field typed and bounded.

A change of the shape of any message raises `PROTOCOL_VERSION`; the golden bytes in the tests hold it in
place.
"""

from typing import Any, cast

import msgpack  # type: ignore[import-untyped]  # ships no types

from pdserve.control.errors import MalformedMessage, UnknownTag, UnknownVersion
from pdserve.control.messages import (
    PROTOCOL_VERSION,
    BlockCounts,
    CancelTask,
    DecodeTask,
    DurationCounts,
    FinishReason,
    Fork,
    GenerationTask,
    LinkReport,
    Message,
    NodeInfo,
    NodeLoad,
    NodeRole,
    PeerCounts,
    Ping,
    Pong,
    PrefillTask,
    ProbeLink,
    SpeculationCounts,
    Stage,
    StageReport,
    TaskFailed,
    Tier,
    TierCounts,
    TokenBatch,
    TokenChunk,
    TokenLogprobs,
    TransferCounts,
)
from pdserve.control.wire import (
    MAX_TOKENS,
    Choice,
    Flag,
    Integer,
    Many,
    Maybe,
    Number,
    Pair,
    Prose,
    Record,
    Row,
    Text,
    TokenIds,
)
from pdserve.engine.sampling_params import (
    MAX_BAD_WORDS,
    MAX_BRANCHES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from pdserve.engine.structured_outputs import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_SCHEMA_CHARS,
    StructuredOutputsParams,
)

MAX_MESSAGE_BYTES = 32 * 2**20
_MAX_TEXT_CHARS = 4096
_MAX_ATTEMPTS = 65_536
MAX_PEERS = 65
MAX_CAUSES = 64
MAX_BUCKETS = 64
MAX_CHUNKS = 65_536

_ID = Text()
_COUNT = Integer()
_SECONDS = Number()
_SIGNED = Integer(low=-(2**63))
_TOKEN_ID = Integer(0, 2**31 - 1)

_STRUCTURED_OUTPUTS = Record(
    StructuredOutputsParams,
    {
        "json": Maybe(Text(MAX_SCHEMA_CHARS)),
        "regex": Maybe(Text(MAX_GRAMMAR_CHARS)),
        "choice": Maybe(Many(Text(MAX_GRAMMAR_CHARS), MAX_CHOICES)),
        "grammar": Maybe(Text(MAX_GRAMMAR_CHARS)),
        "json_object": Flag(),
    },
)
_SAMPLING = Record(
    SamplingParams,
    {
        "max_tokens": Maybe(_COUNT),
        "min_tokens": _COUNT,
        "temperature": Number(),
        "top_k": _SIGNED,
        "top_p": Number(),
        "min_p": Number(),
        "seed": Maybe(_SIGNED),
        "stop": Many(Text(2**20), MAX_STOP_STRINGS),
        "stop_token_ids": Many(_COUNT, 4096),
        "ignore_eos": Flag(),
        "logprobs": Maybe(_COUNT),
        "prompt_logprobs": Maybe(_COUNT),
        "presence_penalty": Number(),
        "frequency_penalty": Number(),
        "repetition_penalty": Number(),
        "logit_bias": Many(Pair(_TOKEN_ID, Number()), MAX_LOGIT_BIASES),
        "allowed_token_ids": Maybe(TokenIds()),
        "bad_words_ids": Many(TokenIds(), MAX_BAD_WORDS),
        "speculative": Flag(),
        "structured_outputs": Maybe(_STRUCTURED_OUTPUTS),
        "priority": Integer(-(2**31), 2**31 - 1),
    },
)
_TASK = Record(
    GenerationTask,
    {
        "request_id": _ID,
        "attempt_id": _ID,
        "prompt_token_ids": TokenIds(),
        "output_token_ids": TokenIds(),
        "sampling": _SAMPLING,
        "cache_salt": Text(_MAX_TEXT_CHARS),
        "timeout_s": _SECONDS,
        "forks": Many(Record(Fork, {"attempt_id": _ID, "seed": _SIGNED}), MAX_BRANCHES),
    },
)
_BLOCKS = Record(BlockCounts, dict.fromkeys(("total", "free", "cached", "in_use", "in_flight"), _COUNT))
_TRANSFER = Record(
    TransferCounts,
    dict.fromkeys(("bytes_sent", "bytes_received", "blocks_sent", "blocks_skipped", "open"), _COUNT),
)
_DURATIONS = Record(DurationCounts, {"buckets": Many(_COUNT, MAX_BUCKETS), "sum_s": _SECONDS})
_PEER = Record(
    PeerCounts,
    {
        "peer": _ID,
        "bytes_per_s": Number(),
        "failures": Many(Pair(_ID, _COUNT), MAX_CAUSES),
        **dict.fromkeys(("bytes_sent", "bytes_received", "open", "completed", "lease_expiries"), _COUNT),
        **dict.fromkeys(("blocks_sent", "blocks_received", "blocks_skipped"), _COUNT),
        **dict.fromkeys(("blocks_refused", "blocks_converted", "blocks_compressed"), _COUNT),
        **dict.fromkeys(("bytes_shared", "shared_memory_failures"), _COUNT),
        **dict.fromkeys(("offer_to_grant", "first_block", "tail"), _DURATIONS),
    },
)
_SPECULATION = Record(SpeculationCounts, {"method": _ID, "drafted": _COUNT, "accepted": _COUNT})
_TIER = Record(
    TierCounts,
    {"tier": Choice(Tier), **dict.fromkeys(("blocks", "max_blocks", "bytes", "hits", "misses", "corrupt"), _COUNT)},
)
_LOAD = Record(
    NodeLoad,
    {
        "ready": Flag(),
        "running": _COUNT,
        "waiting": _COUNT,
        "waiting_tokens": _COUNT,
        "prefill_tokens_per_s": Maybe(Number()),
        "progress_age_s": _SECONDS,
        "blocks": _BLOCKS,
        "transfer": _TRANSFER,
        "speculation": Maybe(_SPECULATION),
        "tiers": Many(_TIER, len(Tier)),
        "preemptions": _COUNT,
        "swaps": _COUNT,
        "peers": Many(_PEER, MAX_PEERS),
        "malformed": _COUNT,
        "refused_connections": _COUNT,
    },
)
NODE_INFO = Record(
    NodeInfo,
    {
        "node_id": _ID,
        "role": Choice(NodeRole),
        "incarnation": _ID,
        "control_endpoint": _ID,
        "transfer_endpoint": Maybe(_ID),
        "model_name": Text(_MAX_TEXT_CHARS),
        "model_digest": _ID,
        "max_model_len": Integer(1),
        "block_size": Integer(1),
        "num_blocks": _COUNT,
        "events_endpoint": Maybe(_ID),
        "events_replay_endpoint": Maybe(_ID),
        "version": _ID,
    },
)
_LOGPROB = Number(finite=False)
_LOGPROBS = Row(
    TokenLogprobs, {"logprob": _LOGPROB, "top": Many(Pair(_TOKEN_ID, _LOGPROB), MAX_LOGPROBS + 1)}, num_always=2
)
_CHUNK = Row(
    TokenChunk,
    {
        "attempt_id": _ID,
        "start": _COUNT,
        "token_ids": TokenIds(),
        "logprobs": Maybe(Many(_LOGPROBS, MAX_TOKENS)),
        "finish_reason": Maybe(Choice(FinishReason)),
        "num_cached_tokens": Maybe(_COUNT),
        "prompt_logprobs": Maybe(Many(_LOGPROBS, MAX_TOKENS)),
        "queue_s": Maybe(_SECONDS),
    },
    num_always=3,
)
_MESSAGES: dict[str, Record] = {
    "ping": Record(Ping, {"gateway_id": _ID, "sequence": _COUNT}),
    "prefill_task": Record(
        PrefillTask,
        {
            "task": _TASK,
            "transfer_id": _ID,
            "decode_endpoint": _ID,
            "decode_node_id": _ID,
            "decode_incarnation": _ID,
        },
    ),
    "decode_task": Record(DecodeTask, {"task": _TASK, "transfer_id": Maybe(_ID)}),
    "cancel_task": Record(CancelTask, {"attempt_id": _ID, "reason": Prose(_MAX_TEXT_CHARS)}),
    "probe_link": Record(
        ProbeLink,
        {
            **dict.fromkeys(("probe_id", "decode_endpoint", "decode_node_id", "decode_incarnation"), _ID),
            "size_bytes": Integer(1),
            "timeout_s": _SECONDS,
        },
    ),
    "link_report": Record(
        LinkReport,
        {
            "probe_id": _ID,
            "code": Maybe(_ID),
            "message": Prose(_MAX_TEXT_CHARS),
            "field": Maybe(_ID),
            **dict.fromkeys(("connect_s", "round_trip_s", "bytes_per_s"), Maybe(Number())),
            "is_encrypted": Flag(),
            "shares_memory": Flag(),
        },
    ),
    "pong": Record(
        Pong, {"sequence": _COUNT, "info": NODE_INFO, "load": _LOAD, "attempt_ids": Many(_ID, _MAX_ATTEMPTS)}
    ),
    "token_batch": Record(TokenBatch, {"chunks": Many(_CHUNK, MAX_CHUNKS)}),
    "stage_report": Record(StageReport, {"attempt_id": _ID, "stage": Choice(Stage)}),
    "task_failed": Record(
        TaskFailed,
        {"attempt_id": _ID, "code": _ID, "message": Prose(_MAX_TEXT_CHARS), "retryable": Flag()},
    ),
}
_TAGS: dict[object, str] = {record.kind: tag for tag, record in _MESSAGES.items()}


def encode(message: Message) -> bytes:
    """Return the wire form of `message`.

    Raises:
        MalformedMessage: a text or array in it is longer than a peer accepts, or no UTF-8 can carry it.
    """
    tag = _TAGS[type(message)]
    try:
        data = cast(bytes, msgpack.packb([PROTOCOL_VERSION, tag, _MESSAGES[tag].to_wire(message)]))
    except (ValueError, OverflowError) as error:
        raise MalformedMessage(tag, str(error)) from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(tag, f"{len(data)} bytes, at most {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """Return the message in `data`.

    Raises:
        MessageError: not msgpack, another version, an unknown tag, or a field that is not what it must be.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessage("message", f"{len(data)} bytes, at most {MAX_MESSAGE_BYTES}")
    envelope = _unpack(data)
    if not isinstance(envelope, list) or len(envelope) != 3:
        raise MalformedMessage("message", "expected [version, tag, fields]")
    version, tag, wire = envelope
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise UnknownVersion(f"version {version!r:.40}, this side speaks {PROTOCOL_VERSION}")
    if type(tag) is not str or tag not in _MESSAGES:
        raise UnknownTag(f"unknown message {tag!r:.80}")
    return cast(Message, _MESSAGES[tag].from_wire(wire, tag))


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.UnpackException, OverflowError) as error:
        raise MalformedMessage("message", f"not msgpack: {error}") from error
