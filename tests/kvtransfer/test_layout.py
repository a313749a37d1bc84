from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvtransfer import KVLayout, LayoutMismatch


def test_block_size_counts_keys_and_values_of_every_layer(layout):
    assert layout.block_size_bytes == 2 * 2 * 1 * 4 * 64 * 4
    assert replace(layout, dtype="bfloat16").block_size_bytes == layout.block_size_bytes // 2


def test_a_shard_holds_its_heads_and_a_row_of_int8_its_scale(layout):
    whole = replace(layout, num_kv_heads=6)
    shard = replace(whole, head_range=(2, 5))

    assert shard.heads == range(2, 5)
    assert shard.block_size_bytes == whole.block_size_bytes // 2
    assert replace(layout, dtype="int8").block_size_bytes == 2 * 2 * 1 * 4 * (64 + 4)


OTHERS = {
    "model_digest": "model-b",
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 40,
}
STATED = {"model_revision": ("main", "v2"), "tokenizer_digest": ("t1", "t2")}
CONVERTIBLE = {"block_size": 8, "dtype": "float16", "head_range": (0, 1)}


@pytest.mark.parametrize("field", OTHERS)
def test_each_field_that_no_conversion_bridges_is_compared_and_hashed(layout, field):
    other = replace(layout, **{field: OTHERS[field]})

    with pytest.raises(LayoutMismatch) as caught:
        layout.check_same_model(other)

    assert (caught.value.field, caught.value.ours, caught.value.theirs) == (
        field,
        getattr(layout, field),
        OTHERS[field],
    )
    assert layout.digest() != other.digest()


@pytest.mark.parametrize("field", STATED)
def test_what_names_the_source_of_a_model_is_compared_where_both_ends_know_it(layout, field):
    ours, theirs = (replace(layout, **{field: value}) for value in STATED[field])

    with pytest.raises(LayoutMismatch, match=f"{field} differs"):
        ours.check_same_model(theirs)
    ours.check_same_model(layout)
    layout.check_same_model(theirs)
    assert ours.has_blocks_of(theirs)


@pytest.mark.parametrize("field", CONVERTIBLE)
def test_what_can_be_converted_is_the_same_model(layout, field):
    other = replace(layout, **{field: CONVERTIBLE[field]})

    layout.check_same_model(other)
    assert layout.digest() == other.digest()


def test_a_layout_survives_the_wire(layout):
    named = replace(layout, model_revision="main", tokenizer_digest="t1")
    for each in (layout, named, replace(layout, num_kv_heads=4, head_range=(1, 3))):
        assert KVLayout.from_wire(each.to_wire()) == each


def test_digest_is_stable_across_versions(layout):
    assert layout.digest() == "ac305f9c3b2894c029ad840e7ea03b51"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_layers", True),
        ("head_dim", -1),
        ("block_size", 2**21),
        ("dtype", "float64"),
        ("model_digest", ""),
        ("num_kv_heads", 1.0),
        ("head_range", (0, 2)),
        ("head_range", (1, 1)),
        ("model_revision", ""),
        ("tokenizer_digest", "x" * 257),
    ],
)
def test_a_wrong_field_is_named(layout, field, value):
    with pytest.raises(ValueError, match=field):
        replace(layout, **{field: value})


FIELDS = [*OTHERS, *STATED, *CONVERTIBLE]
json = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v, max_size=3))


@given(
    st.one_of(
        json,
        st.dictionaries(st.sampled_from([*FIELDS, "extra"]), json),
        st.fixed_dictionaries(dict.fromkeys(FIELDS, json)),
    )
)
def test_from_wire_raises_only_value_error(value):
    try:
        KVLayout.from_wire(value)
    except ValueError:
        return
