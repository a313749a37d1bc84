from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvtransfer.flight_window import PAUSE_S, FlightWindow


def test_it_grows_while_the_receiver_pauses_and_more_could_be_sent():
    window = FlightWindow(8, 64)

    window.sent(0.0)
    window.returned(8, True, 2 * PAUSE_S)
    assert window.size_bytes == 16
    window.returned(8, True, 2.5 * PAUSE_S)  # no pause
    window.returned(8, False, 9 * PAUSE_S)  # nobody waits
    assert window.size_bytes == 16
    for number in range(5):
        window.returned(16, True, (20 + 2 * number) * PAUSE_S)
    assert window.size_bytes == 64


def test_it_shrinks_slowly_once_the_receiver_keeps_up():
    window = FlightWindow(8, 64)
    for number in range(4):
        window.returned(8, True, (2 + 2 * number) * PAUSE_S)
    assert window.size_bytes == 64

    sizes = set()
    for number in range(2_000):
        window.returned(8, True, 8 * PAUSE_S + number * PAUSE_S / 10)
        sizes.add(window.size_bytes)

    assert sizes == {64, 48, 36, 27, 20, 15, 11, 8}


def test_the_time_in_which_nothing_was_sent_is_no_pause_of_the_receiver():
    window = FlightWindow(8, 64)
    window.returned(8, True, 1.0)
    before = window.size_bytes

    window.sent(100.0)
    window.returned(8, True, 100.0 + PAUSE_S / 2)

    assert window.size_bytes == before


@given(
    st.integers(1, 100),
    st.integers(1, 100),
    st.lists(st.tuples(st.integers(1, 50), st.booleans(), st.floats(0, 0.1))),
)
def test_it_stays_within_its_bounds(least, most, events):
    window, now = FlightWindow(least, most), 0.0
    for num_bytes, is_awaited, seconds in events:
        now += seconds
        window.returned(num_bytes, is_awaited, now)
        assert min(least, most) <= window.size_bytes <= most
