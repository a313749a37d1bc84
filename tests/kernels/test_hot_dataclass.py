"""Values of a step: like any frozen dataclass to whoever compares, hashes or replaces them."""

from dataclasses import replace

from pdserve.kernels.hot_dataclass import hot_dataclass


@hot_dataclass(frozen=True, slots=True)
class _Pair:
    first: int
    second: str = "b"


def test_values_are_equal_and_hashed_by_their_fields() -> None:
    assert _Pair(1) == _Pair(1, "b") != _Pair(2)
    assert {_Pair(1): "one"}[_Pair(1, "b")] == "one"
    assert replace(_Pair(1), second="c") == _Pair(1, "c")
