"""The Content-Encoding of request bodies, undone off the event loop and never beyond what a body may have."""

import asyncio
import zlib

_WINDOW_OF_GZIP = 16 + zlib.MAX_WBITS
_DEFLATED = 8  # the lower half of the first byte of a zlib stream (RFC 1950); some send the bare stream behind it
TAKEN = ("gzip", "deflate")
# What lies behind the end of a member is copied: with all of the content in one piece, many small members would cost
# the square of their number.
_PIECE_BYTES = 4096


class UnknownCoding(Exception):
    """The body is encoded in a way that is not understood here."""


class BrokenCoding(Exception):
    """The body is not encoded as is said."""


class BodyTooLarge(Exception):
    """The decoded body is larger than a body may be."""


async def decoded(content: bytes, named: str, max_bytes: int) -> bytes:
    """Return `content` without the coding that its header names.

    It is undone in a thread: a kilobyte may stand for a megabyte. Of gzip there may be several members, one behind the
    other, as what is compressed while it is written has them (RFC 1952).

    Raises:
        UnknownCoding: it is none of `TAKEN`, or several.
        BrokenCoding: `content` is not of that coding, ends too early, or has more behind its end.
        BodyTooLarge: it has more than `max_bytes`; no more than those are ever decoded.
    """
    coding = named.strip().lower().removeprefix("x-")
    if coding in ("", "identity"):
        return content
    if coding not in TAKEN:
        raise UnknownCoding
    return await asyncio.to_thread(_inflated, content, coding, max_bytes)


def _inflated(content: bytes, coding: str, max_bytes: int) -> bytes:
    is_bare = coding == "deflate" and content[:1] != b"" and content[0] & 0xF != _DEFLATED
    window = _WINDOW_OF_GZIP if coding == "gzip" else -zlib.MAX_WBITS if is_bare else zlib.MAX_WBITS
    stream = zlib.decompressobj(window)
    body = bytearray()
    for start in range(0, len(content), _PIECE_BYTES):
        piece = content[start : start + _PIECE_BYTES]
        while piece:
            if stream.eof:
                if coding != "gzip":
                    raise BrokenCoding
                stream = zlib.decompressobj(window)
            try:
                body += stream.decompress(piece, max_bytes + 1 - len(body))
            except zlib.error as error:
                raise BrokenCoding from error
            if len(body) > max_bytes:
                raise BodyTooLarge
            piece = stream.unused_data
    if not stream.eof:
        raise BrokenCoding
    return bytes(body)
