"""The rows of KV blocks in each dtype: what they mean, and how one dtype becomes another. Needs numpy.

Bounds of one conversion: to bfloat16 and float16 the nearest value (relative error 2**-8 and 2**-11 in their normal
range; float16 at most 65504), to int8 half a scale (max |x| / 254), to fp8 (e4m3) 2**-4 in its normal range from 2**-6
to 448. To a wider dtype none, but from int8: value * scale has more digits than bfloat16 and float16 hold, and is
rounded as above.
"""

import numpy as np
import numpy.typing as npt

from pdserve.kvtransfer.layout import SCALE_SIZE_BYTES

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
_LARGEST = np.float32(127)


def _fp8_values() -> Floats:
    """What each byte of e4m3 means: 4 bits of exponent above 7, 3 of mantissa, no infinity."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    values = np.where(exponents > 0, (8 + mantissas) * 2.0 ** (exponents - 10), mantissas * 2.0**-9)
    return np.where(codes & 0x7F == 0x7F, np.nan, np.where(codes & 0x80, -values, values)).astype(np.float32)


_FP8_VALUES = _fp8_values()


def convert_rows(rows: Bytes, source_dtype: str, target_dtype: str) -> Bytes:  # [..., bytes of a row], each
    """Return the same values in another dtype, as new bytes unless both are equal."""
    if source_dtype == target_dtype:
        return rows
    return _encode(_decode(rows, source_dtype), target_dtype)


def are_scales_usable(rows: Bytes) -> bool:  # [..., bytes of a row] of int8
    """Whether each row of int8 has a scale that is finite and not negative."""
    scales = np.ascontiguousarray(rows[..., -SCALE_SIZE_BYTES:]).view("<f4")
    return bool((np.isfinite(scales) & (scales >= 0)).all())


def _decode(rows: Bytes, dtype: str) -> Floats:
    if dtype == "int8":
        scales = np.ascontiguousarray(rows[..., -SCALE_SIZE_BYTES:]).view("<f4")
        return np.asarray(rows[..., :-SCALE_SIZE_BYTES].view(np.int8) * scales, np.float32)
    if dtype == "fp8":
        return _FP8_VALUES[rows]
    elements = np.ascontiguousarray(rows).view({"float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}[dtype])
    if dtype == "bfloat16":
        elements = (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.asarray(elements, np.float32)


def _encode(values: Floats, dtype: str) -> Bytes:
    match dtype:
        case "float32":
            return values.astype("<f4", copy=False).view(np.uint8)
        case "bfloat16":
            return _bfloat16(values).view(np.uint8)
        case "float16":
            largest = np.float32(65504)
            kept = np.where(np.isfinite(values), np.clip(values, -largest, largest), values)
            return kept.astype("<f2").view(np.uint8)
        case "fp8":
            return _fp8(values)
        case _:
            return _int8(values)


def _bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; what is not a number stays none."""
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _fp8(values: Floats) -> Bytes:
    """Round to nearest, ties to even, at most 448; what is not finite becomes what is not a number."""
    is_finite = np.isfinite(values)
    magnitudes = np.minimum(np.where(is_finite, np.abs(values), np.float32(0)), np.float32(448))
    bits = magnitudes.view(np.uint32)
    normal = ((bits + np.uint32(0x7FFFF) + ((bits >> 20) & 1)) >> 20).astype(np.int32) - 960
    small = np.rint(magnitudes * np.float32(512)).astype(np.int32)  # multiples of 2**-9
    codes = np.where(magnitudes < np.float32(2**-6), small, normal)
    signs = np.signbit(values).astype(np.int32) << 7
    return np.where(is_finite, codes | signs, 0x7F).astype(np.uint8)


def _int8(values: Floats) -> Bytes:
    """Round as the KV cache does: a row with a value that is not finite gets a scale that is not a number."""
    is_finite = np.isfinite(values).all(-1, keepdims=True)
    largest = np.abs(values).max(-1, keepdims=True)
    scales = np.where(is_finite, largest / _LARGEST, np.float32(np.nan)).astype("<f4")
    rounded = np.zeros(values.shape, np.float32)
    np.divide(values, scales, out=rounded, where=scales > 0)
    quantized = np.clip(np.rint(rounded), -_LARGEST, _LARGEST).astype(np.int8)
    return np.concatenate((quantized.view(np.uint8), scales.view(np.uint8)), axis=-1)
