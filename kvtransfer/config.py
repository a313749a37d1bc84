"""The limits of a BlockSender and a BlockReceiver. Durations in seconds, sizes in bytes.

Two clocks judge a peer. `lease_s` is for its process: libzmq's own threads answer for it, so a peer that only computes
keeps its lease, and one that died, stopped or cannot be reached loses it. `max_silence_s` is for its event loop: how
long a living process may be too busy to say anything at all.
"""

from dataclasses import dataclass
from math import inf

from pdserve.kvtransfer.agreement import WIRE_DTYPES
from pdserve.kvtransfer.compression import COMPRESSIONS
from pdserve.kvtransfer.curve_keys import CurveKeys
from pdserve.kvtransfer.frames import MAX_TRANSFERS_PER_PEER
from pdserve.kvtransfer.spans import SpanHook

DEFAULT_LEASE_S = 10.0
DEFAULT_MAX_SILENCE_S = 60.0
MIB = 1024 * 1024
SHARED_MEMORY = ("auto", "always", "never")


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderConfig:
    """Limits of a sender."""

    lease_s: float = DEFAULT_LEASE_S
    max_silence_s: float = DEFAULT_MAX_SILENCE_S
    curve: CurveKeys | None = None  # None: in the clear
    uses_shortcuts: bool = True  # to a receiver on loopback TCP by its Unix socket, which is faster
    shared_memory: str = "auto"  # with receivers on this machine, where that is measured to be faster; always, never
    ring_bytes: int = 32 * MIB  # of shared memory with each such receiver; at most its credit
    handshake_timeout_s: float = 5.0
    linger_s: float = 0.3
    max_message_bytes: int = 4 * MIB  # payload of one Blocks message, at least one block
    max_open_transfers: int = 1_024
    wire_dtype: str = "auto"  # the narrower of both ends; int8: at most that, whatever the ends hold
    compression: str = "auto"  # where it is measured to pay; none, zstd: never, always
    on_span: SpanHook | None = None  # told of each transfer at its end

    def __post_init__(self) -> None:
        _check(self, ("max_message_bytes", "ring_bytes"))
        for name, choices in (
            ("wire_dtype", WIRE_DTYPES),
            ("compression", COMPRESSIONS),
            ("shared_memory", SHARED_MEMORY),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverConfig:
    """Limits of a receiver. Payload memory is at most max_peers * credit_bytes."""

    lease_s: float = DEFAULT_LEASE_S
    max_silence_s: float = DEFAULT_MAX_SILENCE_S
    curve: CurveKeys | None = None  # None: in the clear, on loopback only
    uses_shared_memory: bool = True  # take blocks out of memory shared with senders on this machine
    allow_plaintext: bool = False  # without keys also beyond loopback: for networks that are private anyway
    handshake_timeout_s: float = 5.0  # a connection that has not proven its key by then is closed
    linger_s: float = 0.3
    credit_bytes: int = 64 * MIB  # payload under way or unlanded for each sender; raised to one block if smaller
    max_open_transfers: int = 1_024
    max_peers: int = 256
    on_span: SpanHook | None = None  # told of each transfer at its end
    release_timeout_s: float = 5.0  # how long the sink may take to stop a reservation or to free slots

    def __post_init__(self) -> None:
        _check(self, ("credit_bytes", "max_peers", "release_timeout_s"))


def _check(config: SenderConfig | ReceiverConfig, positive: tuple[str, ...]) -> None:
    for name in ("lease_s", "max_silence_s", "handshake_timeout_s", "max_open_transfers", *positive):
        if not 0 < getattr(config, name) < inf:  # also of what is no number
            raise ValueError(f"{name} must be positive and finite, got {getattr(config, name)}")
    if not 0 <= config.linger_s <= 1:
        raise ValueError(f"linger_s must be in [0, 1], got {config.linger_s}")
    if config.max_open_transfers > MAX_TRANSFERS_PER_PEER:  # a heartbeat lists them all
        raise ValueError(
            f"max_open_transfers must be at most {MAX_TRANSFERS_PER_PEER}, got {config.max_open_transfers}"
        )
