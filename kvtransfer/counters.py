"""What the ends of the KV plane have moved, how long it took, and why transfers failed: for each peer and in all."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields

from pdserve.kvtransfer.errors import FailureCode
from pdserve.kvtransfer.latency import LatencyCounts, LatencyHistogram
from pdserve.kvtransfer.rate import RateMeter

MAX_PEERS_COUNTED = 256


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """A snapshot. All but `open` and `bytes_per_s` only grow. `failures` counts transfers and connections by cause:
    `lease_expired` is a peer that did not answer, `peer_lost` a connection that closed, and so on for each
    FailureCode."""

    bytes_sent: int
    bytes_received: int
    blocks_sent: int
    blocks_received: int
    blocks_skipped: int  # the receiver had them already
    open: int
    completed: int
    failures: Mapping[str, int]
    blocks_refused: int = 0  # in offers that were declined
    blocks_converted: int = 0  # cut by the sender, or expanded by the receiver
    blocks_compressed: int = 0
    bytes_shared: int = 0  # of those sent or received: through memory shared with a peer on this machine
    shared_memory_failures: int = 0  # peers that offered it and went on over their socket
    bytes_per_s: float = 0.0  # sent and received, of the last seconds
    offer_to_grant: LatencyCounts = field(default_factory=LatencyCounts)
    first_block: LatencyCounts = field(
        default_factory=LatencyCounts
    )  # from the grant to the first block sent, or arrived
    tail: LatencyCounts = field(default_factory=LatencyCounts)  # from DONE to its acknowledgement

    def __add__(self, other: "TransferCounts") -> "TransferCounts":
        summed = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in fields(self)
            if each.name != "failures"
        }
        return TransferCounts(**summed, failures=dict(Counter(self.failures) + Counter(other.failures)))


@dataclass(frozen=True, slots=True)
class PeerCounts:
    """What was moved to or from one node, over all of its starts and connections."""

    node_id: str
    counts: TransferCounts


@dataclass(slots=True)
class TransferCounters:
    """The running counters of one peer."""

    bytes_sent: int = 0
    bytes_received: int = 0
    blocks_sent: int = 0
    blocks_received: int = 0
    blocks_skipped: int = 0
    blocks_refused: int = 0
    blocks_converted: int = 0
    blocks_compressed: int = 0
    bytes_shared: int = 0
    shared_memory_failures: int = 0
    open: int = 0
    completed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    rate: RateMeter = field(default_factory=RateMeter)
    offer_to_grant: LatencyHistogram = field(default_factory=LatencyHistogram)
    first_block: LatencyHistogram = field(default_factory=LatencyHistogram)
    tail: LatencyHistogram = field(default_factory=LatencyHistogram)

    def count_failure(self, code: str, otherwise: str) -> None:
        """Count one failure under its code, or under `otherwise` if the code is not one of this library's
        own."""
        self.failures[code if code in frozenset(FailureCode) else otherwise] += 1

    def sent(self, num_blocks: int, num_bytes: int, now: float) -> None:
        """Count blocks that left."""
        self.blocks_sent += num_blocks
        self.bytes_sent += num_bytes
        self.rate.observe(num_bytes, now)

    def received(self, num_blocks: int, num_bytes: int, now: float) -> None:
        """Count blocks that have landed."""
        self.blocks_received += num_blocks
        self.bytes_received += num_bytes
        self.rate.observe(num_bytes, now)

    def snapshot(self, now: float = 0.0) -> TransferCounts:
        """Return the values at `now`."""
        return TransferCounts(
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            blocks_sent=self.blocks_sent,
            blocks_received=self.blocks_received,
            blocks_skipped=self.blocks_skipped,
            open=self.open,
            completed=self.completed,
            failures=dict(self.failures),
            blocks_refused=self.blocks_refused,
            blocks_converted=self.blocks_converted,
            blocks_compressed=self.blocks_compressed,
            bytes_shared=self.bytes_shared,
            shared_memory_failures=self.shared_memory_failures,
            bytes_per_s=self.rate.per_s(now),
            offer_to_grant=self.offer_to_grant.snapshot(),
            first_block=self.first_block.snapshot(),
            tail=self.tail.snapshot(),
        )


class PeerBook:
    """The counters of one BlockSender or BlockReceiver by peer. Of peers beyond the most recent ones that have nothing
    open only the sum is kept, so that it does not grow with every node that ever was."""

    def __init__(self, max_peers: int = MAX_PEERS_COUNTED, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.strangers = TransferCounters()  # what no known peer did: refused keys, garbage before a handshake
        self._max_peers = max_peers
        self._peers: dict[str, TransferCounters] = {}  # the one used longest ago first
        self._forgotten = TransferCounters().snapshot()

    def of(self, node_id: str) -> TransferCounters:
        """Return the counters of a node that connects."""
        counters = self._peers.pop(node_id, None) or TransferCounters()
        self._peers[node_id] = counters
        if len(self._peers) > self._max_peers:
            idle = next((name for name, each in self._peers.items() if each.open == 0 and name != node_id), None)
            if idle is not None:
                self._forgotten += self._peers.pop(idle).snapshot()
        return counters

    def num_open(self) -> int:
        """Return how many transfers are open."""
        return sum(counters.open for counters in self._peers.values())

    def peers(self) -> tuple[PeerCounts, ...]:
        """Return the present values for each recent peer."""
        now = self._clock()
        return tuple(PeerCounts(node_id, counters.snapshot(now)) for node_id, counters in self._peers.items())

    def others(self) -> TransferCounts:
        """Return the sum of what no peer in `peers` did: those forgotten, and strangers."""
        return self._forgotten + self.strangers.snapshot()

    def total(self) -> TransferCounts:
        """Return the present values over all peers."""
        return _sum((self.others(), *(each.counts for each in self.peers())))


def _sum(counts: Iterable[TransferCounts]) -> TransferCounts:
    total = TransferCounters().snapshot()
    for each in counts:
        total += each
    return total
