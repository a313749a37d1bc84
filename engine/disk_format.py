"""The file that holds one KV block on disk, version 1.

All numbers little-endian. `header`: magic `PDKVBLK\\0` (8 bytes), version u32, number of tokens u32, length of the salt
u32, length of the payload u64, identity (32 bytes: what the blocks of this model and layout are), key (32), parent key
(32), xxh3-128 of the payload (16); then the salt in UTF-8, the block's own token ids as u32, and the xxh3-64 of all
that, u64. The payload follows to the end of the file: the block's bytes as they lie in the KV cache.
"""

import struct
from dataclasses import dataclass

import xxhash

from pdserve.engine.errors import CorruptBlock
from pdserve.engine.tier_moves import DiskBlock

VERSION = 1
SUFFIX = ".kv"
MAGIC = b"PDKVBLK\0"
_FIXED = struct.Struct("<8sIIIQ32s32s32s16s")
_MAX_TOKENS = 2**16
_MAX_SALT_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class BlockFile:
    """What a header says; `start` is where the payload begins."""

    identity: bytes
    block: DiskBlock
    num_bytes: int
    checksum: bytes
    start: int


def encode_header(identity: bytes, block: DiskBlock, payload: bytes) -> bytes:
    """Return all that comes before the payload."""
    salt = block.salt.encode()
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        len(block.token_ids),
        len(salt),
        len(payload),
        identity,
        block.key,
        block.parent_key,
        xxhash.xxh3_128_digest(payload),
    )
    header = fixed + salt + struct.pack(f"<{len(block.token_ids)}I", *block.token_ids)
    return header + struct.pack("<Q", xxhash.xxh3_64_intdigest(header))


def max_header_bytes() -> int:
    """Return how many bytes a header can have at most."""
    return _FIXED.size + _MAX_SALT_BYTES + 4 * _MAX_TOKENS + 8


def decode_header(data: bytes) -> BlockFile:
    """Read a header from the beginning of a file.

    Raises:
        CorruptBlock: it is none, one of another version, or damaged.
    """
    if len(data) < _FIXED.size:
        raise CorruptBlock("the file is too short for a header")
    magic, version, num_tokens, num_salt_bytes, num_bytes, identity, key, parent_key, checksum = _FIXED.unpack_from(
        data
    )
    if magic != MAGIC or version != VERSION:
        raise CorruptBlock(f"not a block file of version {VERSION}")
    tokens_at = _FIXED.size + num_salt_bytes
    end = tokens_at + 4 * num_tokens
    if num_tokens > _MAX_TOKENS or num_salt_bytes > _MAX_SALT_BYTES or len(data) < end + 8:
        raise CorruptBlock("the header is cut off")
    if xxhash.xxh3_64_intdigest(data[:end]) != int.from_bytes(data[end : end + 8], "little"):
        raise CorruptBlock("the header fails its checksum")
    try:
        salt = data[_FIXED.size : tokens_at].decode()
    except UnicodeDecodeError as error:
        raise CorruptBlock("the salt is not UTF-8") from error
    token_ids = struct.unpack_from(f"<{num_tokens}I", data, tokens_at)
    return BlockFile(identity, DiskBlock(key, parent_key, salt, token_ids), num_bytes, checksum, end + 8)


def decode_block(data: bytes, identity: bytes, key: bytes, num_bytes: int) -> memoryview:
    """Return the payload of a whole file that must hold the block `key` of this model.

    Raises:
        CorruptBlock: it does not, or its bytes are not those that were written.
    """
    file = decode_header(data)
    if file.identity != identity or file.block.key != key:
        raise CorruptBlock("the file holds another block")
    payload = memoryview(data)[file.start :]
    if file.num_bytes != num_bytes or payload.nbytes != num_bytes:
        raise CorruptBlock(f"{payload.nbytes} bytes of payload, not {num_bytes}")
    if xxhash.xxh3_128_digest(payload) != file.checksum:
        raise CorruptBlock("the payload fails its checksum")
    return payload
