"""How the bytes of blocks are written on the wire: as they are, or compressed. zstd needs the package `zstandard`."""

from enum import StrEnum
from functools import cache


class Encoding(StrEnum):
    """What a message of blocks says of its payload."""

    RAW = "raw"
    ZSTD = "zstd"


@cache
def readable_encodings() -> tuple[str, ...]:
    """Return what this process can read."""
    try:
        import zstandard  # noqa: F401  # whether it is here and whole: only an import tells
    except ImportError:
        return (Encoding.RAW,)
    return (Encoding.RAW, Encoding.ZSTD)


def compress(block: memoryview) -> memoryview:
    """Return a block as one zstd frame that names its size."""
    import zstandard  # an extra: whoever never compresses does not need it

    return memoryview(zstandard.ZstdCompressor(level=1, write_checksum=False).compress(block))


def decompress(payload: memoryview, size_bytes: int) -> memoryview:
    """Return the block of a zstd frame; nothing is allocated for one that claims another size.

    Raises:
        ValueError: it is no such frame.
    """
    import zstandard

    try:
        if zstandard.get_frame_parameters(payload).content_size != size_bytes:
            raise ValueError(f"the compressed block does not hold {size_bytes} bytes")
        block = zstandard.ZstdDecompressor().decompress(payload, max_output_size=size_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"the block is not zstd: {error}") from error
    if len(block) != size_bytes:
        raise ValueError(f"the compressed block does not hold {size_bytes} bytes")
    return memoryview(block)
