import pytest

from pdserve.kvtransfer import InvalidTransition
from pdserve.kvtransfer.session import TERMINAL_STATES, TransferCourse, TransferState


def course():
    return TransferCourse("t", 100.0, 0.0)


def test_an_illegal_step_tells_the_story():
    subject = course()
    subject.advance(TransferState.GRANTED, "2 of 3 needed", 1.5)

    with pytest.raises(InvalidTransition) as caught:
        subject.advance(TransferState.DONE, "acknowledged", 2.0)

    assert caught.value.start == "granted"
    assert "+1.500s offered -> granted: 2 of 3 needed" in str(caught.value)


def test_a_terminal_state_is_left_by_nothing():
    for end in TERMINAL_STATES:
        for state in TransferState:
            subject = course()
            path = [TransferState.GRANTED, TransferState.FINISHING, TransferState.DONE]
            for step in path if end is TransferState.DONE else [end]:
                subject.advance(step, "", 0)
            with pytest.raises(InvalidTransition):
                subject.advance(state, "", 0)


def test_the_story_does_not_grow_without_bound():
    subject = course()
    for number in range(1_000):
        subject.tell(str(number), 0)

    assert len(subject.story) == 64 and subject.story[-1] == "+0.000s 999"
