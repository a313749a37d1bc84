"""All that two ends of a transfer say to each other.

A message is one ZeroMQ multipart: a msgpack header `[version, tag, fields]`, then the payload frames. Only
Blocks has payload: its blocks in the order of its indexes, in as few frames as the sender's memory allows, sent and
received without a copy; or none, where they lie in memory that both ends share.
Fields are a map by name. Every size is bounded and every type checked before anything is built; whatever
fails is a FrameError.

Versions: a change that an old peer would misread raises PROTOCOL_VERSION; ends of different versions refuse
each other in the handshake. Times on the wire are durations: the two clocks are never compared.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgpack  # type: ignore[import-untyped]  # ships no types

from pdserve.kvtransfer.agreement import WIRE_DTYPES, Converter
from pdserve.kvtransfer.encoding import Encoding
from pdserve.kvtransfer.errors import FrameError
from pdserve.kvtransfer.field_checks import Check, blob, flag, many, natural, naturals, one_of, text
from pdserve.kvtransfer.header import MAX_BLOCKS_PER_TRANSFER as MAX_BLOCKS_PER_TRANSFER
from pdserve.kvtransfer.header import MAX_HEADER_BYTES as MAX_HEADER_BYTES
from pdserve.kvtransfer.header import MAX_ID_LENGTH as MAX_ID_LENGTH
from pdserve.kvtransfer.header import MAX_METADATA_BYTES as MAX_METADATA_BYTES
from pdserve.kvtransfer.header import MAX_TEXT_LENGTH as MAX_TEXT_LENGTH
from pdserve.kvtransfer.header import unpack_header
from pdserve.kvtransfer.layout import KVLayout
from pdserve.kvtransfer.shared_ring import MAX_RING_SLOTS

PROTOCOL_VERSION = 5
MAX_BLOCKS_PER_MESSAGE = 1_024
MAX_FRAME_BYTES = 4 * 1024 * 1024  # of payload, or one block if that is larger
MAX_TRANSFERS_PER_PEER = 16_384
MAX_CODE_LENGTH = 64
MAX_ENCODINGS = 8
RING_TOKEN_BYTES = 16
MAX_PROBE_BYTES = 1024 * 1024
_MAX_HASH_BYTES = 64
MAX_DEADLINE_S = 7 * 24 * 3_600
_UINT64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Hello:
    """First words of a sender: who it is, whom it believes to be talking to, how it stores blocks, and in what dtype
    it wants them to travel."""

    node_id: str
    incarnation: str
    peer_node_id: str
    peer_incarnation: str
    layout: KVLayout
    wire_dtype: str
    lease_ms: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The receiver agrees and grants the first credit; heartbeats follow the shorter of both leases.

    Blocks travel in the layout `wire`; `converter` changes their dtype. `encodings` are what it can read. `ring` is the
    name and the token with which the sender may hand it shared memory (`ring_door`)."""

    node_id: str
    incarnation: str
    layout: KVLayout
    wire: KVLayout
    converter: str
    encodings: tuple[str, ...]
    lease_ms: int
    credit_bytes: int
    ring: tuple[str, bytes] | None


@dataclass(frozen=True, slots=True)
class Refused:
    """The connection is not wanted, now or any more; the sender drops it. `layout` is the receiver's own."""

    code: str
    message: str
    layout: KVLayout | None


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks that the sender has or will have. `generation` is unique among the offers of one connection."""

    transfer_id: str
    generation: int
    block_hashes: tuple[bytes, ...]
    num_tokens: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Slots are reserved for these indexes of the offered blocks; the receiver has the others."""

    transfer_id: str
    generation: int
    needed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """The offer is declined; nothing is held for it."""

    transfer_id: str
    generation: int
    code: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Blocks:
    """The bytes [start, start + length) of some granted blocks, all in the order of the indexes. They follow in payload
    frames, of which each holds one or more of these pieces whole, or lie in the slots `places` of the shared memory.
    `sequence` counts these messages of a transfer from 0. Sizes and checksums are of what travels, encoded or not."""

    transfer_id: str
    generation: int
    sequence: int
    encoding: str
    start: int  # in a block as it travels; a boundary between layers
    length: int
    places: tuple[int, ...]
    indexes: tuple[int, ...]
    sizes: tuple[int, ...]  # bytes
    checksums: tuple[int, ...]  # xxh3_64


@dataclass(frozen=True, slots=True)
class Credit:
    """The receiver is ready for this many more payload bytes on this connection, and has done with these slots of the
    shared memory."""

    num_bytes: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """Every needed block has been sent; `metadata` is the owners' business, `checksum` is its xxh3_64."""

    transfer_id: str
    generation: int
    num_blocks: int
    num_bytes: int
    metadata: bytes
    checksum: int


@dataclass(frozen=True, slots=True)
class DoneAck:
    """The receiver has verified and committed; the sender may let its blocks go."""

    transfer_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Either side gives the transfer up. Never answered."""

    transfer_id: str
    generation: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """All the (transfer_id, generation) that are open at this end. What was offered (to a receiver) or granted (to a
    sender) before and is not listed has ended there."""

    transfers: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Bytes that are nobody's, one payload frame of them or none: to measure the way there. Under credit as blocks
    are."""

    sequence: int
    num_bytes: int
    checksum: int  # xxh3_64


@dataclass(frozen=True, slots=True)
class ProbeAck:
    """The probe came as it was sent and was dropped."""

    sequence: int


Message = (
    Hello
    | Welcome
    | Refused
    | Offer
    | Grant
    | Refuse
    | Blocks
    | Credit
    | Done
    | DoneAck
    | Abort
    | Heartbeat
    | Probe
    | ProbeAck
)


def encode(message: Message) -> bytes:
    """Build the header frame of a message.

    Raises:
        FrameError: a field is outside the bounds that `decode` accepts.
    """
    tag, checks = _SPECS[type(message)]
    fields: dict[str, object] = {}
    for name, check in checks.items():
        value = getattr(message, name)
        fields[name] = value.to_wire() if isinstance(value, KVLayout) else value
        _checked(tag, name, check, fields[name])
    header: bytes = msgpack.packb([PROTOCOL_VERSION, tag, fields])
    if len(header) > MAX_HEADER_BYTES:
        raise FrameError(f"{tag}: the header has {len(header)} bytes, more than {MAX_HEADER_BYTES}")
    return header


def decode(header: bytes | memoryview, num_payloads: int = 0) -> Message:
    """Read a header frame that came with `num_payloads` payload frames.

    Raises:
        UnsupportedVersion: the peer speaks another version of the protocol.
        FrameError: the bytes are not a message of this protocol.
    """
    tag, fields = unpack_header(header, PROTOCOL_VERSION)
    if tag not in _BY_TAG:
        raise FrameError(f"unknown tag {tag[:MAX_CODE_LENGTH]!r}")
    build, checks = _BY_TAG[tag]
    if set(fields) != set(checks):
        raise FrameError(f"{tag}: the fields must be exactly {', '.join(checks)}")
    values = {name: _checked(tag, name, check, fields[name]) for name, check in checks.items()}
    message = build(**values)
    _check_payloads(message, num_payloads)
    return message


def _check_payloads(message: Message, num_payloads: int) -> None:
    fewest = most = 0
    if isinstance(message, Blocks):
        fewest, most = 1, len(message.indexes)
        if not (most == len(message.sizes) == len(message.checksums)) or most == 0:
            raise FrameError("blocks: indexes, sizes and checksums must be as many, and not none")
        if message.places:
            fewest = 0
            if len(message.places) != most:
                raise FrameError("blocks: places must be none, or as many as indexes")
            most = 0
    elif isinstance(message, Probe):
        fewest = most = int(message.num_bytes > 0)
    if not fewest <= num_payloads <= most:
        tag = _SPECS[type(message)][0]
        raise FrameError(f"{tag}: {num_payloads} payload frames, {fewest}..{most} expected")


def _checked(tag: str, name: str, check: Check, value: object) -> object:
    try:
        return check(value)
    except ValueError as error:
        raise FrameError(f"{tag}.{name}: {error}") from error


def _open_transfer(value: object) -> object:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("must be pairs of transfer_id and generation")
    return (_ID(value[0]), _GENERATION(value[1]))


def _optional_layout(value: object) -> object:
    return None if value is None else KVLayout.from_wire(value)


def _optional_ring(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("must be a name and a token, or nil")
    return (_ID(value[0]), _TOKEN(value[1]))


_ID = text(MAX_ID_LENGTH, min_length=1)
_CODE = text(MAX_CODE_LENGTH, min_length=1)
_WIRE_DTYPE = one_of(*WIRE_DTYPES)
_TEXT = text(MAX_TEXT_LENGTH)
_GENERATION = natural(_UINT64)
_DURATION = natural(MAX_DEADLINE_S * 1_000)
_HASH = blob(_MAX_HASH_BYTES, min_length=16)
_TOKEN = blob(RING_TOKEN_BYTES, min_length=RING_TOKEN_BYTES)
_PLACES = naturals(MAX_RING_SLOTS - 1, MAX_RING_SLOTS)
_NODE: dict[str, Check] = {"node_id": _ID, "incarnation": _ID}
_TRANSFER: dict[str, Check] = {"transfer_id": _ID, "generation": _GENERATION}
_WHY: dict[str, Check] = {"code": _CODE, "message": _TEXT}

_SPECS: dict[type[Message], tuple[str, dict[str, Check]]] = {
    Hello: (
        "hello",
        {
            **_NODE,
            "peer_node_id": _ID,
            "peer_incarnation": _ID,
            "layout": KVLayout.from_wire,
            "wire_dtype": _WIRE_DTYPE,
            "lease_ms": _DURATION,
        },
    ),
    Welcome: (
        "welcome",
        {
            **_NODE,
            "layout": KVLayout.from_wire,
            "wire": KVLayout.from_wire,
            "converter": one_of(*Converter),
            "encodings": many(_CODE, MAX_ENCODINGS),
            "lease_ms": _DURATION,
            "credit_bytes": natural(_UINT64),
            "ring": _optional_ring,
        },
    ),
    Refused: ("refused", {**_WHY, "layout": _optional_layout}),
    Offer: (
        "offer",
        {
            **_TRANSFER,
            "block_hashes": many(_HASH, MAX_BLOCKS_PER_TRANSFER),
            "num_tokens": natural(2**32 - 1),
            "deadline_ms": _DURATION,
        },
    ),
    Grant: ("grant", {**_TRANSFER, "needed": naturals(MAX_BLOCKS_PER_TRANSFER - 1, MAX_BLOCKS_PER_TRANSFER)}),
    Refuse: ("refuse", {**_TRANSFER, **_WHY, "retryable": flag}),
    Blocks: (
        "blocks",
        {
            **_TRANSFER,
            "sequence": natural(_UINT64),
            "encoding": one_of(*Encoding),
            "start": natural(_UINT64),
            "length": natural(_UINT64),
            "places": _PLACES,
            "indexes": naturals(MAX_BLOCKS_PER_TRANSFER - 1, MAX_BLOCKS_PER_MESSAGE),
            "sizes": naturals(_UINT64, MAX_BLOCKS_PER_MESSAGE),
            "checksums": naturals(_UINT64, MAX_BLOCKS_PER_MESSAGE),
        },
    ),
    Credit: ("credit", {"num_bytes": natural(_UINT64), "places": _PLACES}),
    Done: (
        "done",
        {
            **_TRANSFER,
            "num_blocks": natural(MAX_BLOCKS_PER_TRANSFER),
            "num_bytes": natural(_UINT64),
            "metadata": blob(MAX_METADATA_BYTES),
            "checksum": natural(_UINT64),
        },
    ),
    DoneAck: ("done_ack", _TRANSFER),
    Abort: ("abort", {**_TRANSFER, **_WHY}),
    Probe: (
        "probe",
        {"sequence": natural(_UINT64), "num_bytes": natural(MAX_PROBE_BYTES), "checksum": natural(_UINT64)},
    ),
    ProbeAck: ("probe_ack", {"sequence": natural(_UINT64)}),
    Heartbeat: ("heartbeat", {"transfers": many(_open_transfer, MAX_TRANSFERS_PER_PEER)}),
}
_BY_TAG: dict[str, tuple[Callable[..., Message], dict[str, Check]]] = {
    tag: (message_type, checks) for message_type, (tag, checks) in _SPECS.items()
}
