import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gateway.stream_event import StreamEvent
from pdserve.gateway.text_frame import TextFrame


def _event(text: str, model: str, name: str | None) -> StreamEvent:
    return StreamEvent({"id": "x", "model": model, "choices": [{"delta": {"content": text}, "index": 0}]}, name)


@given(text=st.text(), model=st.text(max_size=9), name=st.none() | st.just("delta"))
def test_a_frame_and_its_text_are_the_event_byte_for_byte(text: str, model: str, name: str | None) -> None:
    frame = TextFrame.of(_event(TextFrame.PLACE, model, name))

    assert frame.around(text).encoded() == _event(text, model, name).encoded()


def test_text_that_no_utf8_can_carry_is_refused_alike() -> None:
    frame = TextFrame.of(_event(TextFrame.PLACE, "m", None))

    with pytest.raises(TypeError):
        _event("\ud800", "m", None).encoded()
    with pytest.raises(TypeError):
        frame.around("\ud800")
