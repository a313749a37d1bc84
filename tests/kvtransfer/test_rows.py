"""Rows of KV blocks in each dtype: how far a conversion may be off, and that it is what the engine's kernels do."""

import numpy as np
import pytest

from pdserve.kvtransfer.rows import are_scales_usable, convert_rows


def _values(head_dim=40, spread=8):
    generator = np.random.default_rng(head_dim)
    values = generator.standard_normal((5, 7, head_dim), dtype=np.float32)
    return values * np.logspace(-spread, spread, 7, dtype=np.float32)[:, None]


def _bytes(values):
    return values.astype("<f4").view(np.uint8)


def _floats(rows):
    return rows.view("<f4")


@pytest.mark.parametrize(("dtype", "relative", "spread"), [("bfloat16", 2**-8, 8), ("float16", 2**-11, 1)])
def test_half_precision_is_the_nearest_value(dtype, relative, spread):
    values = _values(spread=spread)

    back = _floats(convert_rows(convert_rows(_bytes(values), "float32", dtype), dtype, "float32"))

    assert (np.abs(back - values) <= np.abs(values) * relative + (2**-25 if dtype == "float16" else 0)).all()


@pytest.mark.parametrize("head_dim", [1, 40, 64, 80, 96, 128, 256])
def test_int8_is_off_by_at_most_half_a_scale(head_dim):
    values = _values(head_dim)

    rows = convert_rows(_bytes(values), "float32", "int8")
    back = _floats(convert_rows(rows, "int8", "float32"))

    assert rows.shape == (5, 7, head_dim + 4)
    scales = np.abs(values).max(-1, keepdims=True) / 127
    assert (np.abs(back - values) <= scales / 2 * (1 + 1e-5)).all()
    assert are_scales_usable(rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "fp8"])
def test_what_was_rounded_once_is_not_rounded_again(dtype):
    once = convert_rows(_bytes(_values(spread=1)), "float32", dtype)
    wide = convert_rows(once, dtype, "float32")

    again = convert_rows(convert_rows(wide, "float32", dtype), dtype, "float32")

    np.testing.assert_allclose(_floats(again), _floats(wide), rtol=1e-6 if dtype == "int8" else 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "fp8"])
def test_the_kernels_write_the_same_bytes(dtype):
    torch = pytest.importorskip("torch")
    from pdserve.kernels.kv_rows import expand_rows, kv_torch_dtype, pack_rows

    values = _values()
    values[0, 0, 0] = 0.0
    values[1, 1] = 0.0
    values[2, 0, :7] = (448.0, 1e6, 1.5 * 2**-9, -(2**-10), -65520.0, 65519.0, -3e38)

    ours = convert_rows(_bytes(values), "float32", dtype)

    theirs = pack_rows(torch.from_numpy(values), kv_torch_dtype(dtype))
    assert ours.tobytes() == theirs.view(torch.uint8).numpy().tobytes()
    expanded = expand_rows(theirs, torch.float32).numpy()
    assert convert_rows(ours, dtype, "float32").tobytes() == expanded.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "fp8"])
def test_a_value_that_is_no_number_is_not_hidden(dtype, bad):
    values = np.ones((1, 4), np.float32)
    values[0, 2] = bad

    rows = convert_rows(_bytes(values), "float32", dtype)

    assert not np.isfinite(_floats(convert_rows(rows, dtype, "float32"))).all()
    if dtype == "int8":
        assert not are_scales_usable(rows)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_scales_that_cannot_be_are_found(scale):
    rows = convert_rows(_bytes(_values()), "float32", "int8").copy()
    rows[3, 2, -4:] = np.array([scale], "<f4").view(np.uint8)

    assert not are_scales_usable(rows)
