"""What a prefix tree counts of each tier: the blocks there, and what lookups found of them."""

from collections.abc import Sequence

from pdserve.engine.tier_moves import Tier, TierUsage


class TierCounts:
    """`nodes` are of now; hits, misses and `corrupt` only grow, in blocks."""

    def __init__(self) -> None:
        self.nodes = dict.fromkeys(Tier, 0)
        self.corrupt = dict.fromkeys(Tier, 0)
        self._hits = dict.fromkeys(Tier, 0)
        self._misses = dict.fromkeys(Tier, 0)

    def count_lookup(self, found: Sequence[Tier], num_blocks: int) -> None:
        """Count a prompt of `num_blocks` full blocks, the first of which were found in these tiers.

        A tier is asked for what those before it did not have.
        """
        missing = num_blocks
        for tier in Tier:
            num_hits = sum(1 for each in found if each is tier)
            missing -= num_hits
            self._hits[tier] += num_hits
            self._misses[tier] += missing

    def usage(self, tier: Tier, num_used: int, num_blocks: int, block_bytes: int) -> TierUsage:
        """Return the state of one tier, of which `num_used` of `num_blocks` blocks are taken."""
        counts = (self._hits[tier], self._misses[tier], self.corrupt[tier])
        return TierUsage(tier, num_used, num_blocks, num_used * block_bytes, *counts)
