import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.stop_strings import StopChecker


def _first_completed(text: str, stops: list[str]) -> tuple[int, str] | None:
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return end, max(hits, key=len)
    return None


def _run(pieces: list[str], stops: list[str], include_stop: bool = False) -> tuple[list[str], StopChecker]:
    checker = StopChecker(stops, include_stop)
    shown = [checker.push(piece) for piece in pieces]
    return [*shown, checker.finish()], checker


letters = st.text(alphabet="ab", min_size=1, max_size=4)


@given(pieces=st.lists(letters, max_size=12), stops=st.lists(letters, min_size=1, max_size=4))
def test_text_is_cut_before_the_first_completed_stop_however_it_is_pieced(pieces, stops):
    """C032."""
    text = "".join(pieces)

    shown, checker = _run(pieces, stops)

    expected = _first_completed(text, stops)
    if expected is None:
        assert "".join(shown) == text and checker.matched is None
    else:
        end, stop = expected
        assert "".join(shown) == text[: end - len(stop)]
        assert checker.matched == stop


@given(pieces=st.lists(letters, max_size=12), stops=st.lists(letters, min_size=1, max_size=4))
def test_only_a_true_prefix_of_a_stop_is_held(pieces, stops):
    """C031, C034."""
    checker = StopChecker(stops)
    fed = shown = ""
    for piece in pieces:
        fed += piece
        shown += checker.push(piece)
        if checker.matched is not None:
            return
        held = fed[len(shown) :]
        longest = max((k for stop in stops for k in range(len(stop)) if fed.endswith(stop[:k])), default=0)
        assert len(held) == longest


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("x\nObservation: y", ["\nObs"], "x"),
        ("a,b,c", ["b,c"], "a,"),
        ("aaab", ["aab"], "a"),
        ("zabca", ["bca", "ab"], "z"),
        ("abcde", ["abcde", "bcd"], "a"),
    ],
)
def test_known_cases_do_not_depend_on_token_boundaries(text, stops, expected):
    """C031, C032."""
    assert "".join(_run([text], stops)[0]) == expected
    assert "".join(_run(list(text), stops)[0]) == expected


def test_stop_is_kept_once_and_whole_when_asked_for():
    """C038."""
    shown, _ = _run(["one ST", "OP two"], ["STOP"], include_stop=True)

    assert "".join(shown) == "one STOP"


def test_held_text_is_released_when_it_can_no_longer_become_a_stop():
    checker = StopChecker(["</think>"])

    assert checker.push("<") == ""
    assert checker.push("b>") == "<b>"
    assert checker.push("</thi") == ""
    assert checker.finish() == "</thi"


def test_stop_inside_the_first_tokens_never_fires_but_one_that_ends_later_does():
    """C042."""
    checker = StopChecker(["END"])

    assert checker.push("END", can_match=False) == "END"
    assert checker.push(" EN", can_match=False) == " "
    assert checker.matched is None
    assert checker.push("D more") == ""
    assert checker.matched == "END"


def test_nothing_is_shown_after_a_match():
    checker = StopChecker(["x"])

    assert checker.push("axb") == "a"
    assert checker.push("more") == "" and checker.finish() == ""
