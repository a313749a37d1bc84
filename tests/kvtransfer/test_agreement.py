"""What two ends agree on: the narrower dtype travels, the sender cuts, one end converts."""

from dataclasses import replace

import pytest

from pdserve.kvtransfer import KVLayout, LayoutMismatch
from pdserve.kvtransfer.agreement import Converter, agree

BASE = KVLayout(
    "m",
    num_layers=2,
    block_size=16,
    num_kv_heads=4,
    head_dim=64,
    dtype="float32",
    model_revision="v1",
    tokenizer_digest="t",
)


@pytest.mark.parametrize(
    ("sender", "receiver", "wire", "converter"),
    [
        ("float32", "float32", "float32", Converter.NOBODY),
        ("float32", "bfloat16", "bfloat16", Converter.SENDER),
        ("float32", "int8", "int8", Converter.SENDER),
        ("bfloat16", "float32", "bfloat16", Converter.RECEIVER),
        ("int8", "float32", "int8", Converter.RECEIVER),
        ("bfloat16", "float16", "float16", Converter.SENDER),
        ("int8", "int8", "int8", Converter.NOBODY),
        ("bfloat16", "fp8", "fp8", Converter.SENDER),
        ("fp8", "int8", "fp8", Converter.RECEIVER),
    ],
)
def test_the_narrower_dtype_travels_and_one_end_converts(sender, receiver, wire, converter):
    agreement = agree(replace(BASE, dtype=sender), replace(BASE, dtype=receiver), "auto")

    assert (agreement.wire.dtype, agreement.converter) == (wire, converter)


@pytest.mark.parametrize(
    ("sender", "receiver", "converter"),
    [
        ("float32", "float32", Converter.BOTH),
        ("float32", "int8", Converter.SENDER),
        ("int8", "bfloat16", Converter.RECEIVER),
        ("int8", "int8", Converter.NOBODY),
    ],
)
def test_int8_on_the_wire_whatever_the_ends_hold(sender, receiver, converter):
    agreement = agree(replace(BASE, dtype=sender), replace(BASE, dtype=receiver), "int8")

    assert (agreement.wire.dtype, agreement.converter) == ("int8", converter)


def test_fp8_is_narrower_than_the_int8_that_is_asked_for():
    agreement = agree(replace(BASE, dtype="fp8"), BASE, "int8")

    assert (agreement.wire.dtype, agreement.converter) == ("fp8", Converter.RECEIVER)


@pytest.mark.parametrize("head_dim", [1, 3, 4])
def test_int8_that_would_be_no_less_does_not_travel(head_dim):
    """The credit of a receiver is at least one of its own blocks: one on the wire must not be larger."""
    layout = replace(BASE, head_dim=head_dim, dtype="bfloat16")

    agreement = agree(layout, layout, "int8")

    assert (agreement.wire.dtype, agreement.converter) == ("bfloat16", Converter.NOBODY)


def test_blocks_travel_in_the_receivers_size_and_heads():
    receiver = replace(BASE, block_size=32, head_range=(1, 3))

    agreement = agree(BASE, receiver, "auto")

    assert agreement.wire == receiver
    assert agreement.is_cut and not agreement.is_expanded
    assert agreement.converter is Converter.NOBODY


def test_equal_layouts_travel_as_they_are():
    agreement = agree(BASE, BASE, "auto")

    assert not agreement.is_cut and not agreement.is_expanded


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_revision", "v2"),
        ("tokenizer_digest", "other"),
        ("model_digest", "other"),
        ("num_layers", 3),
        ("num_kv_heads", 8),
        ("head_dim", 80),
        ("head_range", (0, 2)),
    ],
)
def test_what_cannot_be_converted_is_named(field, value):
    with pytest.raises(LayoutMismatch, match=f"{field} differs") as caught:
        agree(replace(BASE, **{field: value}), BASE, "auto")
    assert caught.value.field == field
