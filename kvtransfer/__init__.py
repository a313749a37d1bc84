"""KV-block transfer between two processes over ZeroMQ. Knows bytes and block indexes, not tensors or
requests."""

from pdserve.kvtransfer.block_hash import hash_blocks
from pdserve.kvtransfer.config import ReceiverConfig, SenderConfig
from pdserve.kvtransfer.counters import PeerCounts, TransferCounts
from pdserve.kvtransfer.curve_keys import CurveKeys, generate_keys
from pdserve.kvtransfer.errors import (
    FailureCode,
    FrameError,
    IntegrityError,
    InvalidTransition,
    KVTransferError,
    LayoutMismatch,
    PeerLost,
    TransferAborted,
    TransferError,
    TransferRefused,
    TransferTimeout,
    UnsupportedVersion,
)
from pdserve.kvtransfer.frame_memory import keep_frame_memory
from pdserve.kvtransfer.head_placement import place_heads
from pdserve.kvtransfer.latency import LATENCY_BOUNDS_S, LatencyCounts
from pdserve.kvtransfer.layout import KVLayout
from pdserve.kvtransfer.outgoing import OutgoingTransfer
from pdserve.kvtransfer.peer_address import PeerAddress
from pdserve.kvtransfer.probe import LinkMeasurement
from pdserve.kvtransfer.receiver import BlockReceiver
from pdserve.kvtransfer.sender import BlockSender
from pdserve.kvtransfer.sink import BlockSink, HeadSink
from pdserve.kvtransfer.spans import TransferSpan

__all__ = [
    "LATENCY_BOUNDS_S",
    "BlockReceiver",
    "BlockSender",
    "BlockSink",
    "CurveKeys",
    "FailureCode",
    "FrameError",
    "HeadSink",
    "IntegrityError",
    "InvalidTransition",
    "KVLayout",
    "KVTransferError",
    "LatencyCounts",
    "LayoutMismatch",
    "LinkMeasurement",
    "OutgoingTransfer",
    "PeerAddress",
    "PeerCounts",
    "PeerLost",
    "ReceiverConfig",
    "SenderConfig",
    "TransferAborted",
    "TransferCounts",
    "TransferError",
    "TransferRefused",
    "TransferSpan",
    "TransferTimeout",
    "UnsupportedVersion",
    "generate_keys",
    "hash_blocks",
    "keep_frame_memory",
    "place_heads",
]
