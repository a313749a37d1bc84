"""Whether what a preempted sequence had computed is kept in host memory or computed again: the cheaper one. Pure."""

from dataclasses import dataclass
from enum import StrEnum


class PreemptionMode(StrEnum):
    """What happens to the blocks of a preempted sequence that the prefix tree does not hold."""

    AUTO = "auto"  # whichever is estimated cheaper
    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class SwapRule:
    """The mode, and what was measured so far: None before the first measurement."""

    mode: PreemptionMode = PreemptionMode.AUTO
    block_bytes: int = 0
    prefill_tokens_per_s: float | None = None
    copy_bytes_per_s: float | None = None

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether copying `num_blocks` out and back takes less time than computing their `num_tokens` again.

        Before anything is measured the copy is taken: memory is faster than a model on every machine that we know.
        """
        if self.mode is not PreemptionMode.AUTO:
            return self.mode is PreemptionMode.SWAP
        if self.prefill_tokens_per_s is None or self.copy_bytes_per_s is None:
            return True
        copy_s = 2 * num_blocks * self.block_bytes / self.copy_bytes_per_s
        return copy_s < num_tokens / self.prefill_tokens_per_s
