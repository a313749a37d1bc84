import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.control.errors import MalformedMessage
from pdserve.control.handover import HANDOVER_VERSION, Handover


def test_bytes_on_the_wire_stay_what_they_are() -> None:
    assert Handover(((70_000,),)).encode().hex() == "92029191ce00011170"
    assert Handover.decode(bytes.fromhex("92029191ce00011170")) == Handover(((70_000,),))
    assert Handover(((7,), (), (8,))).encode().hex() == "92029391079091" + "08"


_BRANCH = st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple)


@given(st.lists(_BRANCH, min_size=1, max_size=128).map(tuple))
def test_every_handover_survives_the_wire(token_ids: tuple[tuple[int, ...], ...]) -> None:
    assert Handover.decode(Handover(token_ids).encode()).sampled_token_ids == token_ids


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_refused_or_are_a_handover(data: bytes) -> None:
    try:
        handover = Handover.decode(data)
    except MalformedMessage:
        return

    assert msgpack.unpackb(data) == [HANDOVER_VERSION, list(map(list, handover.sampled_token_ids))]


@pytest.mark.parametrize(
    "value",
    [
        [HANDOVER_VERSION + 1, [[5]]],
        [HANDOVER_VERSION, []],
        [HANDOVER_VERSION, [5]],
        [HANDOVER_VERSION, [[-1]]],
        [HANDOVER_VERSION, [[True]]],
        [HANDOVER_VERSION, [["5"]]],
        [HANDOVER_VERSION, [[5]], "more"],
        [HANDOVER_VERSION, [[0]] * 129],
        {"sampled": [[5]]},
    ],
)
def test_what_is_no_handover_of_this_version_is_refused(value: object) -> None:
    with pytest.raises(MalformedMessage):
        Handover.decode(msgpack.packb(value))
