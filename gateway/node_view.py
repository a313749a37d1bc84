"""What the gateway knows of a node at one instant: the facts that routing and admission decide from. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

from pdserve.control.messages import NodeInfo, NodeLoad, NodeRole


class NodeKey(NamedTuple):
    """One incarnation of a node: a restarted node is another one."""

    node_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class AttemptCost:
    """What an attempt will ask of a node, until the node's own NodeLoad shows it."""

    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node. `load` is None until its first Pong; `pending` is what was sent to it since its last one."""

    info: NodeInfo
    load: NodeLoad | None
    is_ready: bool
    lease_age_s: float
    num_open_attempts: int
    pending: AttemptCost
    num_malformed: int = 0  # messages of its that this gateway could not read

    @property
    def key(self) -> NodeKey:
        """Return which incarnation this is."""
        return NodeKey(self.info.node_id, self.info.incarnation)

    @property
    def is_decode(self) -> bool:
        """Whether it can decode."""
        return self.info.role is NodeRole.DECODE

    @property
    def num_sequences(self) -> int:
        """Return how many sequences it has: as it said, or as this gateway sent it, whichever is more."""
        said = self.load.running + self.load.waiting if self.load else 0
        return max(said, self.num_open_attempts)

    @property
    def num_available_blocks(self) -> int:
        """Return how many blocks it can give to a new sequence."""
        if self.load is None:
            return 0
        return self.load.blocks.free + self.load.blocks.cached - self.pending.num_blocks

    @property
    def num_waiting_tokens(self) -> int:
        """Return how many prompt tokens it has yet to compute."""
        return (self.load.waiting_tokens if self.load else 0) + self.pending.num_tokens

    def prefill_wait_s(self, num_tokens: int) -> float | None:
        """Estimate when it would have computed `num_tokens` more prompt tokens; None until it was measured."""
        if self.load is None or not self.load.prefill_tokens_per_s:
            return None
        return (self.num_waiting_tokens + num_tokens) / self.load.prefill_tokens_per_s


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens`."""
    return -(-num_tokens // block_size)
