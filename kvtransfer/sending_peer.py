"""What a receiver knows of one sender that is connected to it."""

import asyncio
import secrets
from collections.abc import Callable, Sequence

import xxhash

from pdserve.kvtransfer.agreement import Agreement
from pdserve.kvtransfer.counters import TransferCounters
from pdserve.kvtransfer.credit import CreditLedger
from pdserve.kvtransfer.encoding import readable_encodings
from pdserve.kvtransfer.errors import FailureCode, FrameError, TransferRefused
from pdserve.kvtransfer.frames import RING_TOKEN_BYTES, Blocks, Credit, Hello, Offer, Probe, ProbeAck, Refuse, Welcome
from pdserve.kvtransfer.shared_ring import RingView

_CREDIT_BYTES_PER_MESSAGE = 2 * 1024 * 1024


class SendingPeer:
    """One connection of one start of one sender. `transfers` are the (transfer_id, generation) that it has
    open."""

    def __init__(
        self,
        identity: bytes,
        hello: Hello,
        *,
        lease_s: float,
        credit_bytes: int,
        agreement: Agreement,
        counters: TransferCounters,
        now: float,
    ) -> None:
        self.identity = identity
        self.node_id = hello.node_id
        self.incarnation = hello.incarnation
        self.lease_s = lease_s
        self.counters = counters
        self.transfers: set[tuple[str, int]] = set()
        self.last_heard = now
        self.dropped = asyncio.Event()
        self.agreement = agreement
        self.ring_token = secrets.token_bytes(RING_TOKEN_BYTES)
        self.ring: RingView | None = None
        self.first_head = agreement.wire.heads.start  # tells the shards of one transfer apart
        self._credit_bytes = credit_bytes
        self._ledger = CreditLedger(credit_bytes)
        self._owed_bytes = 0  # done with, and not yet returned
        self._owed_places: list[int] = []

    def cause_of_end(self, now: float) -> FailureCode:
        """Tell a connection that closed from one that was given up because nobody answered for a lease."""
        return FailureCode.LEASE_EXPIRED if now - self.last_heard > self.lease_s / 2 else FailureCode.PEER_LOST

    async def wait_ended(self, max_silence_s: float, send_heartbeat: Callable[[], None]) -> bool:
        """Send heartbeats until the peer is dropped; return False if it has said nothing at all for too long."""
        loop = asyncio.get_running_loop()
        interval_s = min(self.lease_s, max_silence_s) / 3
        while not self.dropped.is_set():
            before = loop.time()
            try:
                async with asyncio.timeout(interval_s):
                    await self.dropped.wait()
            except TimeoutError:
                send_heartbeat()
            now = loop.time()
            was_stalled = now - before > interval_s + max_silence_s / 2  # then what the peer said may lie unread
            if not was_stalled and now - self.last_heard > max_silence_s:
                return False
        return True

    def welcome(self, node_id: str, incarnation: str, ring_name: str | None) -> Welcome:
        """Return the receiver's answer to this peer's hello."""
        return Welcome(
            node_id,
            incarnation,
            self.agreement.receiver,
            self.agreement.wire,
            self.agreement.converter,
            readable_encodings(),
            max(1, round(self.lease_s * 1000)),
            self._credit_bytes,
            None if ring_name is None else (ring_name, self.ring_token),
        )

    def payloads(self, header: Blocks, frames: tuple[memoryview, ...]) -> tuple[memoryview, ...]:
        """Return where the payload of a message is: its frames, or the shared memory.

        Raises:
            FrameError: the sender names slots that there are not.
        """
        if not header.places:
            return frames
        views = None if self.ring is None else self.ring.payloads(header.places, header.sizes)
        if views is None:
            raise FrameError("blocks: places outside the shared memory")
        self.counters.bytes_shared += sum(header.sizes)
        return views

    def refuse(self, offer: Offer, refusal: TransferRefused) -> Refuse:
        """Count an offer that is declined; return what to tell the sender."""
        self.counters.failures[refusal.code] += 1
        self.counters.blocks_refused += len(offer.block_hashes)
        return Refuse(offer.transfer_id, offer.generation, refusal.code, refusal.message, refusal.retryable)

    def charge(self, header: Blocks, payloads: Sequence[memoryview]) -> bool:
        """Charge blocks that arrived to the credit; False if the sender had none for them."""
        return self._ledger.charge(self._cost_bytes(header, payloads))

    def hand_back(self, header: Blocks, payloads: Sequence[memoryview]) -> Credit | None:
        """Be done with charged blocks; return what to tell the sender, if it is time: a word for a few MiB, or for
        the last that are here."""
        self._owed_bytes += self._cost_bytes(header, payloads)
        self._owed_places.extend(header.places)
        is_due = self._owed_bytes >= min(_CREDIT_BYTES_PER_MESSAGE, self._credit_bytes // 4)
        if not is_due and self._owed_bytes < self._ledger.held_bytes:
            return None
        credit = Credit(self._owed_bytes, tuple(self._owed_places))
        self._ledger.hand_back(self._owed_bytes)
        self._owed_bytes = 0
        self._owed_places.clear()
        return credit

    def drop_probe(self, probe: Probe, payloads: Sequence[memoryview]) -> ProbeAck:
        """Check the bytes of a probe and let them go; the answer gives their credit back.

        Raises:
            FrameError: they are not what the header says, or there was no credit for them.
        """
        for payload in payloads:
            if payload.nbytes != probe.num_bytes or xxhash.xxh3_64_intdigest(payload) != probe.checksum:
                raise FrameError("a probe arrived as other bytes than were sent")
            if not self._ledger.charge(payload.nbytes):
                raise FrameError("a probe without credit")
            self._ledger.hand_back(payload.nbytes)
        return ProbeAck(probe.sequence)

    def _cost_bytes(self, header: Blocks, payloads: Sequence[memoryview]) -> int:
        # A short block costs what it will take once it is decompressed, and never less than a layer: the credit bounds
        # the number of queued frames as well.
        num_bytes = max(header.length, self.agreement.piece_size_bytes)
        return max(sum(payload.nbytes for payload in payloads), len(header.indexes) * num_bytes)
