"""Which layers of a running step are final: for whoever ships blocks before the step is over. Torch-free."""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.engine.block_pool import BlockId
from pdserve.engine.scheduled_batch import ScheduledBatch, ScheduledSpan

_NUM_LAYER_GROUPS = 8
_MIN_BLOCKS = 4  # below, one message for the whole chunk is over sooner than ten


def layer_group_ends(num_layers: int) -> frozenset[int]:
    """Return after how many layers of a chunk what has been computed is told: after each eighth, and besides after
    the first layer and the last but one.

    On a link as fast as the computation what is left to send at its end is what the link has stood idle at its start,
    the first group; on a faster link it is the last group. So both are single layers.
    """
    eighths = {-(-num_layers * group // _NUM_LAYER_GROUPS) for group in range(1, _NUM_LAYER_GROUPS + 1)}
    return frozenset(eighths | {1, max(1, num_layers - 1)})


@dataclass(frozen=True, slots=True)
class LayerProgress:
    """In blocks [first_block, end_block) of a sequence the first `num_layers` layers will not change any more."""

    seq_id: str
    block_table: tuple[BlockId, ...]
    first_block: int
    end_block: int
    num_layers: int


class LayerWatch:
    """Tells of each group of layers that a step has computed, for the sequences that somebody follows."""

    def __init__(
        self,
        num_layers: int,
        block_size: int,
        is_followed: Callable[[str], bool],
        tell: Callable[[LayerProgress], None],
    ) -> None:
        self._block_size = block_size
        self._is_followed = is_followed
        self._tell = tell
        self._group_ends = layer_group_ends(num_layers)

    def of(self, batch: ScheduledBatch) -> Callable[[int], None] | None:
        """Return what a step must be told after each layer (how many are done), or None if nobody follows it."""
        followed = [
            (span, blocks)
            for span in batch.spans
            if len(blocks := self._final_blocks(span)) >= _MIN_BLOCKS and self._is_followed(span.seq_id)
        ]
        if not followed:
            return None

        def on_layer(num_layers: int) -> None:
            if num_layers not in self._group_ends:
                return
            for span, blocks in followed:
                self._tell(LayerProgress(span.seq_id, span.block_table, blocks.start, blocks.stop, num_layers))

        return on_layer

    def _final_blocks(self, span: ScheduledSpan) -> range:
        """Return the blocks that this span completes: with the last token of a prompt also a partial one."""
        end = span.start + len(span.token_ids)
        is_last = span.sampling is not None
        return range(
            span.start // self._block_size, -(-end // self._block_size) if is_last else end // self._block_size
        )
