"""Who is at the other end of a connection, who is at this one, and what is offered over it."""

from dataclasses import dataclass

from pdserve.kvtransfer.layout import KVLayout


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a receiver is and which start of which node it must be."""

    endpoint: str  # tcp://host:port
    node_id: str
    incarnation: str
    public_key: str | None = None  # with CURVE; None: the sender's own pair, which all nodes share


@dataclass(frozen=True, slots=True)
class SenderIdentity:
    """What a sender says of itself in the handshake."""

    node_id: str
    incarnation: str
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class OfferTerms:
    """What an offer says, apart from its generation."""

    transfer_id: str
    block_hashes: tuple[bytes, ...]  # of the wire's blocks
    num_tokens: int
    deadline: float  # monotonic
    label: str = ""
