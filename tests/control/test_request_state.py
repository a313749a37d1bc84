import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.control.errors import IllegalTransition
from pdserve.control.request_state import (
    MAX_STORY_ENTRIES,
    TRANSITIONS,
    RequestProgress,
    RequestStatus,
    StatusChange,
    check_path,
)

S = RequestStatus


@pytest.mark.parametrize(
    "path",
    [
        (S.PREFILLING, S.TRANSFERRING, S.DECODING, S.FINISHED),
        (S.PREFILLING, S.DECODING, S.FINISHED),
        (S.PREFILLING, S.FINISHED),
        (S.PREFILLING, S.TRANSFERRING, S.FINISHED),
        (S.PREFILLING, S.TRANSFERRING, S.DECODING, S.PREFILLING, S.DECODING, S.FINISHED),
        (S.PREFILLING, S.TRANSFERRING, S.PREFILLING, S.FAILED),
        (S.CANCELLED,),
        (S.FAILED,),
    ],
)
def test_the_journeys_of_the_architecture_are_allowed(path: tuple[RequestStatus, ...]) -> None:
    check_path("r", S.QUEUED, tuple(StatusChange(status) for status in path))


def test_nothing_follows_a_terminal_status() -> None:
    terminal = {status for status in RequestStatus if status.is_terminal}

    assert terminal == {S.FINISHED, S.FAILED, S.CANCELLED}
    assert all(not TRANSITIONS[status] for status in terminal)


def test_every_active_status_can_fail_and_be_cancelled() -> None:
    for status in RequestStatus:
        if not status.is_terminal:
            assert {S.FAILED, S.CANCELLED} <= TRANSITIONS[status]


def test_an_illegal_step_tells_the_story() -> None:
    progress = RequestProgress("r1")
    progress.advance(S.PREFILLING, "first chunk")
    progress.advance(S.FINISHED)

    with pytest.raises(IllegalTransition) as caught:
        progress.advance(S.DECODING)

    assert caught.value.story == ("queued", "prefilling (first chunk)", "finished")
    assert progress.status is S.FINISHED


@pytest.mark.parametrize("target", [S.TRANSFERRING, S.DECODING, S.FINISHED])
def test_a_milestone_nobody_reported_is_filled_in(target: RequestStatus) -> None:
    path = RequestProgress("r").advance(target)

    assert [change.status for change in path] == [S.PREFILLING, target]


@given(st.lists(st.sampled_from(RequestStatus), max_size=100))
def test_progress_only_ever_walks_the_table(targets: list[RequestStatus]) -> None:
    progress = RequestProgress("r")
    for target in targets:
        before = progress.status
        try:
            path = progress.advance(target)
        except IllegalTransition as error:
            assert progress.status is before
            assert len(error.story) <= MAX_STORY_ENTRIES
        else:
            check_path("r", before, path)
            assert progress.status is target
