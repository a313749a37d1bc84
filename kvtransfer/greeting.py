"""The first word of a connection: what a sender says, and whether it is one to talk to. Pure."""

from pdserve.kvtransfer.agreement import Agreement, agree
from pdserve.kvtransfer.config import SenderConfig
from pdserve.kvtransfer.errors import FailureCode, TransferRefused
from pdserve.kvtransfer.frames import Hello
from pdserve.kvtransfer.layout import KVLayout
from pdserve.kvtransfer.peer_address import PeerAddress, SenderIdentity


def make_hello(identity: SenderIdentity, peer: PeerAddress, config: SenderConfig) -> Hello:
    """Return what a sender says to a receiver."""
    lease_ms = round(config.lease_s * 1000)
    names = (identity.node_id, identity.incarnation, peer.node_id, peer.incarnation)
    return Hello(*names, identity.layout, config.wire_dtype, lease_ms)


def check_hello(hello: Hello, node_id: str, incarnation: str, layout: KVLayout, takes_shards: bool) -> Agreement:
    """Return how the sender's blocks will travel to the receiver that the other arguments describe.

    Raises:
        TransferRefused: the sender means another node, or another start of this one.
        LayoutMismatch: no conversion leads from its blocks to ours; it names the field.
    """
    if (hello.peer_node_id, hello.peer_incarnation) != (node_id, incarnation):
        meant = f"{hello.peer_node_id}/{hello.peer_incarnation}"
        raise TransferRefused(FailureCode.WRONG_NODE, f"this is {node_id}/{incarnation}, not {meant}")
    return agree(hello.layout, layout, hello.wire_dtype, takes_shards=takes_shards)
