import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvtransfer import InvalidTransition, PeerLost, TransferAborted, TransferRefused, TransferTimeout
from pdserve.kvtransfer.outgoing_session import (
    Acknowledged,
    AnnounceGrant,
    ConnectionLost,
    End,
    Granted,
    LocalAborted,
    OutgoingSession,
    PeerAborted,
    SendAbort,
    Tick,
    WasRefused,
)


def session(num_blocks=3, deadline=100.0):
    return OutgoingSession("t", num_blocks, 64, deadline=deadline, now=0.0)


def test_the_usual_course():
    subject = session()

    assert subject.handle(Granted((0, 2)), 1) == (AnnounceGrant((0, 2)),)
    assert subject.is_needed(2) and not subject.is_needed(1)
    assert [subject.take([2], 2), subject.take([0], 3)] == [0, 1]
    subject.finish(4)
    assert subject.handle(Acknowledged(), 5) == (End(None),)


@pytest.mark.parametrize("needed", [(3,), (0, 0), (-1,)])
def test_a_grant_of_what_was_not_offered_breaks_off(needed):
    abort, end = session().handle(Granted(needed), 1)

    assert isinstance(abort, SendAbort) and abort.code == "protocol"
    assert isinstance(end.error, TransferAborted)


@pytest.mark.parametrize("event", [Granted((0,)), Acknowledged(), WasRefused("x", "", False)])
def test_a_word_out_of_order_breaks_off(event):
    subject = session()
    subject.handle(Granted((0,)), 1)

    assert isinstance(subject.handle(event, 2)[0], SendAbort)


def test_nothing_but_the_deadline_ends_a_transfer_by_the_clock():
    subject = session(deadline=500.0)

    assert subject.handle(Tick(), 499.9) == ()
    assert isinstance(subject.handle(Tick(), 500.0)[-1].error, TransferTimeout)


def test_a_refusal_keeps_its_words():
    (end,) = session().handle(WasRefused("no_blocks", "full", True), 1)

    assert isinstance(end.error, TransferRefused)
    assert (end.error.code, end.error.message, end.error.retryable) == ("no_blocks", "full", True)


@pytest.mark.parametrize("step", ["take before grant", "take twice", "take unneeded", "finish early"])
def test_the_owners_mistakes_raise_with_the_story(step):
    subject = session()
    with pytest.raises(InvalidTransition, match="its story"):
        if step == "take before grant":
            subject.take([0], 1)
        subject.handle(Granted((0, 1)), 1)
        if step == "take twice":
            subject.take([0], 1)
            subject.take([0], 1)
        if step == "take unneeded":
            subject.take([2], 1)
        if step == "finish early":
            subject.finish(1)


EVENTS = st.one_of(
    st.builds(Granted, st.lists(st.integers(-1, 3), max_size=3).map(tuple)),
    st.just(Granted((0, 1))),
    st.just(WasRefused("full", "", True)),
    st.just(Acknowledged()),
    st.just(PeerAborted("wrong_checksum", "")),
    st.just(LocalAborted("gone", "")),
    st.just(ConnectionLost(PeerLost("gone"))),
    st.just(Tick()),
    st.sampled_from([("take", 0), ("take", 1), ("finish",)]),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 6)), max_size=10))
@settings(max_examples=400)
def test_any_order_of_events_ends_exactly_once_by_the_deadline(steps):
    subject = session(deadline=30.0)
    now, seen = 0.0, []
    for event, pause in steps:
        now += pause
        if isinstance(event, tuple):
            try:
                subject.take([event[1]], now) if event[0] == "take" else subject.finish(now)
            except InvalidTransition:
                continue
        else:
            seen.extend(subject.handle(event, now))
    seen.extend(subject.handle(Tick(), max(now, 30.0)))

    assert sum(isinstance(instruction, End) for instruction in seen) == 1
    assert isinstance(seen[-1], End) and subject.course.is_terminal
    assert sum(isinstance(instruction, SendAbort) for instruction in seen) <= 1
    if seen[-1].error is None:
        assert subject.num_sent == len(next(i for i in seen if isinstance(i, AnnounceGrant)).needed)
