import itertools

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvtransfer import InvalidTransition
from pdserve.kvtransfer.frames import Blocks, Done
from pdserve.kvtransfer.incoming_session import (
    BlocksArrived,
    CancelReserve,
    Commit,
    CommitFailed,
    Committed,
    DoneArrived,
    Failed,
    IncomingSession,
    Land,
    PeerAborted,
    PeerVanished,
    Release,
    Reserved,
    ReserveRefused,
    SendAbort,
    SendDoneAck,
    SendGrant,
    SendRefuse,
    Tick,
)
from pdserve.kvtransfer.session import TransferState

SIZE = 8


def session(deadline=100.0):
    return IncomingSession("t", 3, SIZE, deadline=deadline, now=0.0)


def blocks(sequence, *indexes, size=SIZE, payload=None, checksum=None):
    payloads = [payload if payload is not None else bytes([index]) * SIZE for index in indexes]
    checksums = [checksum if checksum is not None else xxhash.xxh3_64_intdigest(data) for data in payloads]
    header = Blocks("t", 1, sequence, "raw", 0, SIZE, (), indexes, tuple(size for _ in indexes), tuple(checksums))
    return BlocksArrived(header, tuple(memoryview(data) for data in payloads))


def done(num_blocks, num_bytes=None, checksum=None):
    digest = xxhash.xxh3_64_intdigest(b"m") if checksum is None else checksum
    return DoneArrived(Done("t", 1, num_blocks, num_blocks * SIZE if num_bytes is None else num_bytes, b"m", digest))


def granted(*needed):
    subject = session()
    assert subject.handle(Reserved(needed), 1) == (SendGrant(needed),)
    return subject


def test_the_usual_course():
    subject = granted(0, 2)

    (land,) = subject.handle(blocks(0, 2, 0), 2)
    assert [(index, bytes(payload)) for index, payload in land.blocks] == [(2, b"\2" * 8), (0, b"\0" * 8)]
    assert subject.handle(done(2), 3) == (Commit(b"m"),)
    assert subject.handle(Committed(), 4) == (SendDoneAck(),)
    assert subject.is_settled and subject.failure is None


@pytest.mark.parametrize(
    ("arrival", "code"),
    [
        (blocks(0, 1), "not_granted"),
        (blocks(0, 0, 0), "duplicate_block"),
        (blocks(1, 0), "wrong_sequence"),
        (blocks(0, 0, size=7), "wrong_size"),
        (blocks(0, 0, payload=b"short"), "wrong_size"),
        (blocks(0, 0, checksum=1), "wrong_checksum"),
        (done(2), "incomplete"),
    ],
)
def test_wrong_bytes_end_the_transfer_and_are_never_landed(arrival, code):
    subject = granted(0, 2)

    abort, release = subject.handle(arrival, 2)

    assert isinstance(abort, SendAbort) and isinstance(release, Release)
    assert abort.code == release.code == code


@pytest.mark.parametrize(
    ("arrival", "code"),
    [
        (blocks(0, 0), "wrong_sequence"),
        (blocks(1, 0), "duplicate_block"),
        (done(2), "incomplete"),
        (done(1, num_bytes=7), "incomplete"),
        (done(1, checksum=5), "wrong_checksum"),
    ],
)
def test_replays_and_false_totals_end_the_transfer(arrival, code):
    subject = granted(0)
    subject.handle(blocks(0, 0), 2)

    abort, release = subject.handle(arrival, 3)

    assert (abort.code, release.code) == (code, code)


def test_a_frame_may_hold_several_blocks_but_no_block_two_frames():
    data = [bytes([index]) * SIZE for index in range(3)]
    checksums = tuple(xxhash.xxh3_64_intdigest(block) for block in data)
    header = Blocks("t", 1, 0, "raw", 0, SIZE, (), (0, 1, 2), (SIZE,) * 3, checksums)
    whole = b"".join(data)

    def arrive(*frames):
        return granted(0, 1, 2).handle(BlocksArrived(header, tuple(memoryview(frame) for frame in frames)), 2)

    for frames in ((whole,), (whole[:SIZE], whole[SIZE:]), (whole[: 2 * SIZE], whole[2 * SIZE :])):
        (land,) = arrive(*frames)
        assert [bytes(block) for _, block in land.blocks] == data
    for frames in ((whole[:4], whole[4:]), (whole[:-1],), (whole + b"x",), (whole, b"x"), (b"", whole)):
        abort, _ = arrive(*frames)
        assert abort.code == "wrong_size"


def test_blocks_before_the_grant_end_the_transfer():
    abort, cancel = session().handle(blocks(0, 0), 1)

    assert abort.code == "not_granted" and cancel == CancelReserve()


def test_a_reservation_that_comes_too_late_is_released():
    subject = session()
    assert subject.handle(PeerAborted("gone", ""), 1) == (CancelReserve(),)
    assert not subject.is_settled

    assert subject.handle(Reserved((0,)), 2) == (Release("gone", ""),)
    assert subject.is_settled


def test_a_sink_that_asks_for_what_was_not_offered_is_released_and_refused():
    refuse, release = session().handle(Reserved((5,)), 1)

    assert isinstance(refuse, SendRefuse) and isinstance(release, Release)


def test_a_vanished_peer_is_not_told():
    assert granted(0).handle(PeerVanished("silent"), 2) == (Release("peer_lost", "silent"),)


def test_once_the_commit_has_begun_nothing_takes_the_blocks_back():
    subject = granted(0)
    subject.handle(blocks(0, 0), 2)
    subject.handle(done(1), 3)

    for event in (PeerAborted("x", ""), Failed("x", ""), PeerVanished(""), Tick(), blocks(1, 0), done(1)):
        assert subject.handle(event, 1_000) == ()
    assert subject.handle(CommitFailed("bad"), 4) == (SendAbort("commit_failed", "bad"),)


@pytest.mark.parametrize("event", [Committed(), CommitFailed(""), Reserved(()), ReserveRefused("", "", True)])
def test_a_driver_that_reports_what_it_was_not_asked_for_is_told_the_story(event):
    subject = granted(0)

    with pytest.raises(InvalidTransition, match="its story"):
        subject.handle(event, 2)


class Driver:
    """Obeys the session as the real one does and checks what it is told to do."""

    def __init__(self, outcomes):
        self.session = session(deadline=30.0)
        self.outcomes = outcomes  # "fails" for each call into the sink, in turn
        self.is_reserving = True
        self.was_reserved = False
        self.ends = []
        self.landed = set()

    def feed(self, event, now):
        if isinstance(event, Reserved | ReserveRefused):
            if not self.is_reserving:
                return
            self.is_reserving = False
            self.was_reserved = isinstance(event, Reserved)
        for instruction in self.session.handle(event, now):
            self.perform(instruction, now)

    def perform(self, instruction, now):
        match instruction:
            case Land(landing, _):
                assert self.was_reserved and not self.ends
                indexes = {index for index, _ in landing}
                assert not indexes & self.landed
                self.landed |= indexes
                if self.fails():
                    self.feed(Failed("land_failed", ""), now)
            case Commit():
                assert self.landed == {0, 2}
                self.ends.append("commit")
                self.feed(CommitFailed("") if self.fails() else Committed(), now)
            case Release():
                assert self.was_reserved
                self.ends.append("release")
            case CancelReserve():
                self.feed(Reserved((0, 2)) if self.fails() else ReserveRefused("closing", "", True), now)

    def fails(self):
        return next(self.outcomes, False)

    def check(self, now):
        self.feed(Tick(), max(now, 30.0))
        assert self.session.is_settled
        assert len(self.ends) == (1 if self.was_reserved else 0)
        assert (self.session.course.state is TransferState.DONE) == (self.session.failure is None)


ALPHABET = (
    Reserved((0, 2)),
    ReserveRefused("full", "", True),
    blocks(0, 0),
    blocks(1, 2),
    blocks(0, 0, 2),
    blocks(0, 1),
    done(2),
    PeerAborted("gone", ""),
    Failed("cancelled", ""),
    PeerVanished("silent"),
    Tick(),
)


def test_every_order_of_four_events_commits_or_releases_exactly_once():
    for events in itertools.product(ALPHABET, repeat=4):
        for outcome in (False, True):
            driver = Driver(itertools.repeat(outcome))
            for now, event in enumerate(events):
                driver.feed(event, float(now))
            driver.check(4.0)


@given(
    st.lists(st.tuples(st.sampled_from(ALPHABET), st.floats(0, 6)), max_size=14),
    st.lists(st.booleans(), max_size=5),
)
@settings(max_examples=300)
def test_any_order_of_events_commits_or_releases_exactly_once_by_the_deadline(steps, outcomes):
    driver = Driver(iter(outcomes))
    now = 0.0
    for event, pause in steps:
        now += pause
        driver.feed(event, now)
    driver.check(now)


def _piece(start, length, index=0, sequence=0):
    data = bytes([index]) * SIZE
    piece = data[start : start + length]
    header = Blocks("t", 1, sequence, "raw", start, length, (), (index,), (length,), (xxhash.xxh3_64_intdigest(piece),))
    return BlocksArrived(header, (memoryview(piece),))


def _in_layers():
    subject = IncomingSession("t", 3, SIZE, piece_size_bytes=2, deadline=10.0, now=0.0)
    subject.handle(Reserved((0,)), 0.0)
    return subject


def test_a_block_in_layers_is_whole_with_the_last():
    subject = _in_layers()
    landings = [subject.handle(_piece(start, 4, sequence=start // 4), 1.0)[0] for start in (0, 4)]
    assert [(landing.start, landing.blocks[0][1].nbytes) for landing in landings] == [(0, 4), (4, 4)]
    assert subject.num_landed == 1


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        ((0, 4), (0, 4), "duplicate_block"),
        ((0, 8), (0, 2), "duplicate_block"),
        ((0, 4), (6, 2), "wrong_sequence"),
        ((0, 4), (4, 6), "wrong_size"),
        ((0, 4), (4, 3), "wrong_size"),
        ((0, 4), (3, 4), "wrong_size"),
        ((0, 4), (4, 0), "wrong_size"),
    ],
)
def test_layers_out_of_order_or_shape_end_the_transfer(first, second, code):
    subject = _in_layers()
    subject.handle(_piece(*first), 1.0)
    subject.handle(_piece(*second, sequence=1), 1.0)
    assert subject.failure[0] == code


def test_blocks_that_are_converted_come_whole():
    subject = IncomingSession("t", 3, SIZE, deadline=10.0, now=0.0)
    subject.handle(Reserved((0,)), 0.0)
    subject.handle(_piece(0, 4), 1.0)
    assert subject.failure[0] == "wrong_size"
