import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvtransfer import hash_blocks

tokens = st.lists(st.integers(0, 5), max_size=12)


def test_one_hash_for_each_block_and_one_for_the_partial_last():
    assert len(hash_blocks(range(8), 4, "", "m")) == 2
    assert len(hash_blocks(range(9), 4, "", "m")) == 3
    assert hash_blocks([], 4, "", "m") == []


def test_hashes_are_stable_and_256_bits_wide():  # C134
    hashes = hash_blocks([1, 2, 3], 2, "tenant", "model")

    assert [block_hash.hex() for block_hash in hashes] == [
        "1dca941b556b8cb58d5fad3cdb992fe0c0431615f0e8e194964160c9e04d8941",
        "a6307bdda0b243836f5256e808e4e8dfbf3160dcacdc4a3a373744cb39dc886c",
    ]


def test_a_partial_block_differs_from_the_full_block_of_the_same_tokens():
    partial = hash_blocks([1, 2], 4, "", "m")
    full = hash_blocks([1, 2], 2, "", "m")
    longer = hash_blocks([1, 2, 0, 0], 4, "", "m")

    assert len({partial[0], full[0], longer[0]}) == 3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("X", ""), ("", "X")),
        (("ab", "c"), ("a", "bc")),
        (("", "m"), ("m", "")),
        (("m\0", ""), ("m", "\0")),
    ],
)
def test_the_same_text_in_another_field_gives_another_hash(first, second):  # C132
    assert hash_blocks([1], 4, *first) != hash_blocks([1], 4, *second)


@given(tokens, tokens, st.integers(1, 4), st.sampled_from("ab"), st.sampled_from("ab"))
def test_hashes_agree_exactly_on_the_common_prefix(first, second, block_size, salt_a, salt_b):
    hashes_a = hash_blocks(first, block_size, salt_a, "m")
    hashes_b = hash_blocks(second, block_size, salt_b, "m")

    for number, (hash_a, hash_b) in enumerate(zip(hashes_a, hashes_b, strict=False)):
        end = (number + 1) * block_size
        assert (hash_a == hash_b) == (salt_a == salt_b and first[:end] == second[:end])


@pytest.mark.parametrize("token_ids", [[-1], [2**32], ["1"], [None]])
def test_what_is_no_token_id_is_refused(token_ids):
    with pytest.raises(ValueError, match="token id"):
        hash_blocks(token_ids, 4, "", "m")


def test_a_block_size_of_zero_is_refused():
    with pytest.raises(ValueError, match="block_size"):
        hash_blocks([1], 0, "", "m")
