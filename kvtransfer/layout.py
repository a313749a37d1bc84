"""The shape contract of one KV block.

One block in memory and on the wire is contiguous, C order, little-endian:

    [num_layers, 2 (K then V), heads held here, block_size, row]

A row is one head of one token: head_dim elements of the dtype (fp8 is e4m3 without infinities). A row of int8 is
head_dim values and, in its last 4 bytes, their scale as float32 (x = value * scale), so that what moves a row moves its
scale.
A partial last block has the same size; its unused token positions are zero or whatever the sender has
there, and `num_tokens` of the offer says how many are meant.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from hashlib import blake2b

from pdserve.kvtransfer.errors import LayoutMismatch

DTYPE_SIZE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
SCALE_SIZE_BYTES = 4  # of a row of int8
_NOT_CONVERTED = ("model_digest", "num_layers", "num_kv_heads", "head_dim")
_STATED_OR_NOT = ("tokenizer_digest", "model_revision")
_MAX_DIMENSION = 2**20
_MAX_DIGEST_LENGTH = 256


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The model's identity and the shape of its blocks. `num_kv_heads` is the model's; a shard of a tensor-parallel
    node holds the heads [first, end) of `head_range`, None being all."""

    model_digest: str  # names the weights, not only the architecture
    num_layers: int
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_SIZE_BYTES
    head_range: tuple[int, int] | None = None
    model_revision: str | None = None  # of the model's source; None: not known, agrees with any
    tokenizer_digest: str | None = None  # names the vocabulary; None: not known, agrees with any

    def __post_init__(self) -> None:
        if not isinstance(self.model_digest, str) or not 0 < len(self.model_digest) <= _MAX_DIGEST_LENGTH:
            raise ValueError(f"model_digest must be 1..{_MAX_DIGEST_LENGTH} characters")
        for name in _STATED_OR_NOT:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not 0 < len(value) <= _MAX_DIGEST_LENGTH):
                raise ValueError(f"{name} must be nil or 1..{_MAX_DIGEST_LENGTH} characters")
        for name in ("num_layers", "block_size", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= _MAX_DIMENSION:
                raise ValueError(f"{name} must be a whole number in [1, {_MAX_DIMENSION}], got {value!r}")
        if self.dtype not in DTYPE_SIZE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_SIZE_BYTES)}, got {self.dtype!r}")
        if self.head_range is not None and not 0 <= self.head_range[0] < self.head_range[1] <= self.num_kv_heads:
            raise ValueError(f"head_range must be a part of [0, {self.num_kv_heads}), got {self.head_range!r}")

    @property
    def heads(self) -> range:
        """The KV heads held here, by their number in the model."""
        return range(*self.head_range) if self.head_range is not None else range(self.num_kv_heads)

    @property
    def row_size_bytes(self) -> int:
        """Bytes of one head of one token."""
        scale_size_bytes = SCALE_SIZE_BYTES if self.dtype == "int8" else 0
        return self.head_dim * DTYPE_SIZE_BYTES[self.dtype] + scale_size_bytes

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block."""
        return self.num_layers * 2 * len(self.heads) * self.block_size * self.row_size_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def digest(self) -> str:
        """Hash the fields that no conversion bridges (hex): equal digests mean the same keys and values, however they
        are cut into blocks and rounded, of the same tokens."""
        hasher = blake2b(digest_size=16, person=b"kv-layout")
        for name in (*_NOT_CONVERTED, "tokenizer_digest"):
            encoded = f"{name}={getattr(self, name)}".encode()
            hasher.update(len(encoded).to_bytes(4, "little") + encoded)
        return hasher.hexdigest()

    def check_same_model(self, other: "KVLayout") -> None:
        """Check that both layouts hold the same keys and values.

        Raises:
            LayoutMismatch: naming the first field that differs and both values.
        """
        for name in _NOT_CONVERTED:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise LayoutMismatch(name, ours, theirs)
        for name in _STATED_OR_NOT:
            ours, theirs = getattr(self, name), getattr(other, name)
            if None not in (ours, theirs) and ours != theirs:
                raise LayoutMismatch(name, ours, theirs)

    def has_blocks_of(self, other: "KVLayout") -> bool:
        """Whether bytes can be copied as they are: equal in everything but what names the model's source."""
        unnamed = replace(self, model_revision=None, tokenizer_digest=None)
        return unnamed == replace(other, model_revision=None, tokenizer_digest=None)

    def to_wire(self) -> dict[str, object]:
        """Return the fields by name, as they go into a handshake."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_wire(cls, value: object) -> "KVLayout":
        """Read what `to_wire` wrote.

        Raises:
            ValueError: the value has missing, unknown or wrong fields.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or set(value) != names:
            raise ValueError(f"a layout is a map of exactly {', '.join(sorted(names))}")
        if not isinstance(value["dtype"], str):
            raise ValueError("dtype must be text")
        return cls(**{**value, "head_range": _head_range(value["head_range"])})


def _head_range(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("head_range must be nil or a pair")
    first, end = value
    if type(first) is not int or type(end) is not int:
        raise ValueError("head_range must be a pair of whole numbers")
    return first, end
