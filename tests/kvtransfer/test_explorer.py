"""Both sessions with the channels between them, in every order of events there is: no slot has two owners or none, and
both ends agree."""

import copy
from collections import deque

import pytest
import xxhash

from pdserve.kvtransfer import PeerLost
from pdserve.kvtransfer import incoming_session as incoming
from pdserve.kvtransfer import outgoing_session as outgoing
from pdserve.kvtransfer.frames import Blocks, Done
from pdserve.kvtransfer.session import TransferCourse, TransferState

SIZE = 8
NEEDED = (0, 2)
DEADLINE = 10.0
BLOCKS = {index: bytes([index]) * SIZE for index in NEEDED}


class World:
    """One transfer, its two ends and the words on their way. Methods that begin with `may_` are the possible events."""

    def __init__(self):
        self.sender = outgoing.OutgoingSession("t", 3, SIZE, deadline=DEADLINE, now=0.0)
        self.receiver = incoming.IncomingSession("t", 3, SIZE, deadline=DEADLINE, now=0.0)
        self.to_receiver = deque()
        self.to_sender = deque()
        self.is_reserving = True
        self.is_committing = False
        self.sender_is_connected = True  # each end learns of a lost connection by itself
        self.receiver_is_connected = True
        self.sender_now = 0.0  # each has a clock of its own
        self.receiver_now = 0.0
        self.sender_ends = []
        self.slots = "free"  # free, open, committed
        self.budget = {"abort": 1, "fail": 1, "repeat": 1}

    def key(self):
        return (
            self.sender.course.state,
            self.receiver.course.state,
            self.receiver.num_landed,
            tuple(sorted(self.sender._unsent)),
            tuple(self.to_receiver),
            tuple(self.to_sender),
            self.is_reserving,
            self.is_committing,
            self.sender_is_connected,
            self.receiver_is_connected,
            self.sender_now,
            self.receiver_now,
            tuple(self.sender_ends),
            self.slots,
            tuple(self.budget.items()),
        )

    def events(self):
        return [name for name in dir(self) if name.startswith("may_")]

    def may_reserve(self):
        return self._reserved(incoming.Reserved(NEEDED))

    def may_refuse(self):
        return self._reserved(incoming.ReserveRefused("full", "", True))

    def may_commit(self):
        return self._committed(incoming.Committed())

    def may_fail_to_commit(self):
        return self._committed(incoming.CommitFailed(""))

    def may_deliver_to_receiver(self):
        return bool(self.to_receiver) and self._receive(_arrival(self.to_receiver.popleft()))

    def may_deliver_to_sender(self):
        return bool(self.to_sender) and self._tell_sender(self.to_sender.popleft())

    def may_send_a_block(self):
        if self.sender.course.state not in (TransferState.GRANTED, TransferState.SENDING) or not self.sender._unsent:
            return False
        index = min(self.sender._unsent)
        sequence = self.sender.take([index], self.sender_now)
        return self._say(("block", index, sequence))

    def may_finish(self):
        is_ready = self.sender.course.state is TransferState.SENDING and not self.sender._unsent
        if not is_ready:
            return False
        self.sender.finish(self.sender_now)
        num_bytes = len(NEEDED) * SIZE
        return self._say(incoming.DoneArrived(Done("t", 1, 2, num_bytes, b"", xxhash.xxh3_64_intdigest(b""))))

    def may_abort_at_the_sender(self):
        return self._spend("abort") and self._tell_sender(outgoing.LocalAborted("cancelled", ""))

    def may_fail_at_the_receiver(self):
        return self._spend("fail") and self._receive(incoming.Failed("cancelled", ""))

    def may_repeat_a_word_to_the_receiver(self):
        """A peer that does not keep to the rules says something twice."""
        return bool(self.to_receiver) and self._spend("repeat") and self._receive(_arrival(self.to_receiver[0]))

    def may_lose_the_connection_at_the_sender(self):
        if not self.sender_is_connected:
            return False
        self.sender_is_connected = False
        self.to_sender.clear()
        return self._tell_sender(outgoing.ConnectionLost(PeerLost("gone")))

    def may_lose_the_connection_at_the_receiver(self):
        if not self.receiver_is_connected:
            return False
        self.receiver_is_connected = False
        self.to_receiver.clear()
        return self._receive(incoming.PeerVanished("gone"))

    def may_pass_the_senders_deadline(self):
        if self.sender_now == DEADLINE:
            return False
        self.sender_now = DEADLINE
        return self._tell_sender(outgoing.Tick())

    def may_pass_the_receivers_deadline(self):
        if self.receiver_now == DEADLINE:
            return False
        self.receiver_now = DEADLINE
        return self._receive(incoming.Tick())

    def _spend(self, what):
        self.budget[what] -= 1
        return self.budget[what] >= 0

    def _say(self, event):
        if self.sender_is_connected and self.receiver_is_connected:
            self.to_receiver.append(event)
        return True

    def _reserved(self, event):
        if not self.is_reserving:
            return False
        self.is_reserving = False
        if isinstance(event, incoming.Reserved):
            assert self.slots == "free"
            self.slots = "open"
        return self._receive(event)

    def _committed(self, event):
        if not self.is_committing:
            return False
        self.is_committing = False
        return self._receive(event)

    def _tell_sender(self, event):
        for instruction in self.sender.handle(event, self.sender_now):
            if isinstance(instruction, outgoing.SendAbort):
                self._say(incoming.PeerAborted(instruction.code, ""))
            elif isinstance(instruction, outgoing.End):
                self.sender_ends.append(type(instruction.error).__name__)
        return True

    def _receive(self, event):
        for instruction in self.receiver.handle(event, self.receiver_now):
            self._perform(instruction)
        return True

    def _perform(self, instruction):
        match instruction:
            case incoming.SendGrant(needed):
                word = outgoing.Granted(needed)
            case incoming.SendRefuse(code, message, retryable):
                word = outgoing.WasRefused(code, message, retryable)
            case incoming.SendAbort(code):
                word = outgoing.PeerAborted(code, "")
            case incoming.SendDoneAck():
                word = outgoing.Acknowledged()
            case incoming.Land():
                assert self.slots == "open", "a write into slots that are not the transfer's"
                return
            case incoming.Commit():
                assert self.slots == "open" and self.receiver.num_landed == len(NEEDED)
                self.slots = "committed"
                self.is_committing = True
                return
            case incoming.Release():
                assert self.slots == "open", "freed twice, or never reserved"
                self.slots = "free"
                return
            case incoming.CancelReserve():
                assert self.is_reserving  # what comes of it, slots or nothing, is an event of its own
                return
        if self.sender_is_connected and self.receiver_is_connected:
            self.to_sender.append(word)

    def check(self):
        assert len(self.sender_ends) <= 1
        assert len(self.sender_ends) == int(self.sender.course.is_terminal)
        if self.receiver.course.state is TransferState.DONE:
            assert self.slots == "committed"
        if self.sender_ends == ["NoneType"]:
            assert self.slots == "committed", "the sender let its blocks go, and nobody has them"
        if self.receiver.is_settled:
            assert self.slots != "open", "slots without an owner"
            assert not self.is_reserving and not self.is_committing


def _clone(thing):
    """A copy that shares nothing mutable; much cheaper than deepcopy, for values in it are frozen."""
    twin = copy.copy(thing)
    for name, value in vars(thing).items():
        if isinstance(value, set | dict | list | deque):
            setattr(twin, name, value.copy())
        elif isinstance(value, outgoing.OutgoingSession | incoming.IncomingSession | TransferCourse):
            setattr(twin, name, _clone(value))
    return twin


def _arrival(word):
    if not isinstance(word, tuple):
        return word
    _, index, sequence = word
    header = Blocks("t", 1, sequence, "raw", 0, SIZE, (), (index,), (SIZE,), (xxhash.xxh3_64_intdigest(BLOCKS[index]),))
    return incoming.BlocksArrived(header, (memoryview(BLOCKS[index]),))


@pytest.mark.timeout(300)
def test_every_order_of_events_leaves_each_slot_one_owner_and_both_ends_at_rest():
    start = World()
    seen = {start.key()}
    frontier = deque([start])
    num_at_rest = 0
    while frontier:
        world = frontier.popleft()
        is_busy = world.to_receiver or world.to_sender or world.is_reserving or world.is_committing
        if world.sender_now == world.receiver_now == DEADLINE and not is_busy:
            num_at_rest += 1
            assert world.sender.course.is_terminal and world.receiver.is_settled
        for event in world.events():
            following = _clone(world)
            if getattr(following, event)():
                following.check()
                if following.key() not in seen:
                    seen.add(following.key())
                    frontier.append(following)

    assert len(seen) > 5_000 and num_at_rest > 300
