"""Content hashes of token blocks: equal hashes mean equal KV blocks, on whichever node they were computed.

A hash covers everything that decides the contents of a block: the model, the salt (tenant, adapter), the
block size, every earlier token and the block's own tokens. Each field is typed and length-prefixed, so that
the same text in another field, or split at another place, gives another hash.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_SIZE_BYTES = 32
_FULL, _PARTIAL = b"F", b"P"


def hash_blocks(token_ids: Sequence[int], block_size: int, salt: str, model_digest: str) -> list[bytes]:
    """Hash each block of `token_ids`: one for every full block and one more for a partial last block.

    Raises:
        ValueError: block_size is not positive, or a token id is negative or above 2**32 - 1.
    """
    if block_size <= 0:
        raise ValueError(f"block_size must be positive, got {block_size}")
    parent = _root(block_size, salt, model_digest)
    hashes: list[bytes] = []
    for start in range(0, len(token_ids), block_size):
        tokens = _encode_tokens(token_ids[start : start + block_size])
        kind = _FULL if start + block_size <= len(token_ids) else _PARTIAL
        parent = _digest(b"block", parent, kind, tokens)
        hashes.append(parent)
    return hashes


def _root(block_size: int, salt: str, model_digest: str) -> bytes:
    return _digest(b"root", model_digest.encode(), salt.encode(), block_size.to_bytes(8, "little"))


def _encode_tokens(token_ids: Sequence[int]) -> bytes:
    try:
        tokens = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a token id is not a whole number in [0, 2**32): {error}") from error
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def _digest(*fields: bytes) -> bytes:
    hasher = blake2b(digest_size=HASH_SIZE_BYTES, person=b"kv-block-hash")
    for field in fields:
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.digest()
