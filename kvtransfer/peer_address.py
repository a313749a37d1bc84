"""Who is at the other end of a connection, who is at this one, and what is offered over it."""

from dataclasses import dataclass

from pdserve.kvtransfer.header import MAX_ID_LENGTH
from pdserve.kvtransfer.layout import KVLayout


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a receiver is and which start of which node it must be."""

    endpoint: str  # tcp://host:port
    node_id: str
    incarnation: str
    public_key: str | None = None  # with CURVE; None: the sender's own pair, which all nodes share

    def __post_init__(self) -> None:
        check_node(self.node_id, self.incarnation)


@dataclass(frozen=True, slots=True)
class SenderIdentity:
    """What a sender says of itself in the handshake."""

    node_id: str
    incarnation: str
    layout: KVLayout

    def __post_init__(self) -> None:
        check_node(self.node_id, self.incarnation)


@dataclass(frozen=True, slots=True)
class OfferTerms:
    """What an offer says, apart from its generation."""

    transfer_id: str
    block_hashes: tuple[bytes, ...]  # of the wire's blocks
    num_tokens: int
    deadline: float  # monotonic
    label: str = ""


def check_node(node_id: str, incarnation: str) -> None:
    """Check that a node's names can be said in a handshake.

    Raises:
        ValueError: one cannot.
    """
    for name, value in (("node_id", node_id), ("incarnation", incarnation)):
        if not 0 < len(value.encode("utf-8")) <= MAX_ID_LENGTH:
            raise ValueError(f"{name} must be text of 1..{MAX_ID_LENGTH} bytes, got {value[:MAX_ID_LENGTH]!r}")
