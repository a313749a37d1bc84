"""How much memory the KV of a model takes, and how many requests fit beside its weights. Arithmetic only."""

from dataclasses import dataclass

from pdserve.engine.errors import InvalidRequest
from pdserve.engine.kv_shape import KVShape

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
_SCALE_BYTES = 4  # an int8 vector of head_dim values has one float32 scale


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """KV of one model in one dtype, in blocks of `block_size` tokens.

    Every layer keeps the whole context, also the ones that look back a window only: that is what pdserve holds.
    """

    shape: KVShape
    kv_dtype: str
    block_size: int

    def __post_init__(self) -> None:
        if self.kv_dtype not in VALUE_BYTES:
            raise InvalidRequest("kv_cache_dtype", f"must be one of {', '.join(VALUE_BYTES)}, got {self.kv_dtype!r}")
        if self.block_size < 1:
            raise InvalidRequest("block_size", f"must be at least 1, got {self.block_size}")

    @property
    def layer_token_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        scale = _SCALE_BYTES if self.kv_dtype == "int8" else 0
        return 2 * self.shape.num_kv_heads * (self.shape.head_dim * VALUE_BYTES[self.kv_dtype] + scale)

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return self.shape.num_layers * self.layer_token_bytes

    def request_bytes(self, num_tokens: int) -> int:
        """Return what a request of `num_tokens` reserves if its memory is one run of that length."""
        return num_tokens * self.token_bytes

    def paged_bytes(self, num_tokens: int) -> int:
        """Return what it holds in blocks: the last one may be partly empty."""
        return -(-num_tokens // self.block_size) * self.block_size * self.token_bytes

    def windowed_bytes(self, num_tokens: int) -> int:
        """Return what would do if layers with a window forgot what lies before it; pdserve keeps it."""
        seen = sum(num_tokens if window is None else min(num_tokens, window) for window in self.shape.windows)
        return seen * self.layer_token_bytes

    def num_preallocated(self, available_bytes: int, context: int) -> int:
        """Return how many requests fit if each reserves the whole `context` when it begins."""
        return max(0, available_bytes) // self.request_bytes(context)

    def num_paged(self, available_bytes: int, average_tokens: int) -> int:
        """Return how many requests fit in blocks when they hold `average_tokens` on average."""
        return max(0, available_bytes) // self.paged_bytes(average_tokens)
