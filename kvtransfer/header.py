"""The header frame of a message: msgpack `[version, tag, fields]` without extension types, every size bounded."""

from typing import NoReturn

import msgpack  # type: ignore[import-untyped]  # ships no types

from pdserve.kvtransfer.errors import FrameError, UnsupportedVersion

MAX_HEADER_BYTES = 4 * 1024 * 1024
MAX_METADATA_BYTES = 1024 * 1024
MAX_TEXT_LENGTH = 1_024
MAX_ID_LENGTH = 128
MAX_BLOCKS_PER_TRANSFER = 65_536


def unpack_header(header: bytes | memoryview, version_spoken: int) -> tuple[str, dict[object, object]]:
    """Return the tag and the fields of a header frame.

    Raises:
        UnsupportedVersion: it is of another version.
        FrameError: it is no header.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise FrameError(f"the header has {len(header)} bytes, more than {MAX_HEADER_BYTES}")
    try:
        value: object = msgpack.unpackb(
            header,
            raw=False,
            strict_map_key=True,
            ext_hook=_refuse_ext,
            max_str_len=MAX_TEXT_LENGTH,
            max_bin_len=MAX_METADATA_BYTES,
            max_array_len=MAX_BLOCKS_PER_TRANSFER,
            max_map_len=64,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise FrameError(f"the header is not msgpack as we speak it: {error or type(error).__name__}") from error
    if not isinstance(value, list) or len(value) != 3:
        raise FrameError("a header is [version, tag, fields]")
    version, tag, fields = value
    if type(version) is not int:
        raise FrameError("the version is not a whole number")
    if version != version_spoken:
        raise UnsupportedVersion(f"protocol version {version} is not {version_spoken}")
    if not isinstance(tag, str) or not isinstance(fields, dict):
        raise FrameError("a header is [version, tag, fields]")
    return tag, fields


def _refuse_ext(code: int, data: bytes) -> NoReturn:
    raise FrameError(f"msgpack extension type {code} is not part of this protocol")
