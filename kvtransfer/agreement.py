"""What two ends agree on in the handshake: the layout in which blocks travel, and which end changes their dtype.

The blocks on the wire are the receiver's in everything but the dtype: the sender cuts them to the receiver's block
size and picks its heads. The dtype is the narrower one of the two, so that a value is rounded, or widened, at one end
only, and no more bytes travel than one of them holds. `wire_dtype` int8 makes blocks of two wider ends travel as int8
where that is less: the sender rounds them, the receiver widens them. Pure; both ends compute it, and the sender
compares.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from pdserve.kvtransfer.errors import LayoutMismatch
from pdserve.kvtransfer.layout import KVLayout

WIRE_DTYPES = ("auto", "int8")


class Converter(StrEnum):
    """Which end changes the dtype of values."""

    NOBODY = "nobody"
    SENDER = "sender"
    RECEIVER = "receiver"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Agreement:
    """How blocks travel from one layout to another."""

    sender: KVLayout
    receiver: KVLayout
    wire: KVLayout
    converter: Converter
    is_cut: bool = field(init=False)  # whether the sender makes other blocks than it holds, in dtype, size or heads
    is_expanded: bool = field(init=False)  # whether the receiver changes the dtype of what arrives
    piece_size_bytes: int = field(init=False)  # blocks may be sent in multiples of it: a layer where bytes are merely
    # copied, else a whole block

    def __post_init__(self) -> None:
        """Work out once what every message asks."""
        is_cut, is_expanded = not self.sender.has_blocks_of(self.wire), self.receiver.dtype != self.wire.dtype
        num_pieces = 1 if is_cut or is_expanded else self.wire.num_layers
        object.__setattr__(self, "is_cut", is_cut)
        object.__setattr__(self, "is_expanded", is_expanded)
        object.__setattr__(self, "piece_size_bytes", self.wire.block_size_bytes // num_pieces)


def agree(sender: KVLayout, receiver: KVLayout, wire_dtype: str, *, takes_shards: bool = False) -> Agreement:
    """Decide how blocks travel; where the receiver takes shards a sender may hold only some of its heads.

    Raises:
        LayoutMismatch: they cannot; it names the field, "ours" being the receiver's.
    """
    receiver.check_same_model(sender)
    heads = range(max(sender.heads.start, receiver.heads.start), min(sender.heads.stop, receiver.heads.stop))
    if not heads or (heads != receiver.heads and not takes_shards):
        raise LayoutMismatch("head_range", _bounds(receiver.heads), _bounds(sender.heads))
    dtype = _narrower(sender, receiver)
    if wire_dtype == "int8" and _has_shorter_rows("int8", replace(receiver, dtype=dtype)):
        dtype = "int8"
    head_range = sender.head_range if heads == sender.heads else _bounds(heads)
    wire = replace(receiver, dtype=dtype, head_range=head_range)
    is_rounded, is_widened = sender.dtype != dtype, receiver.dtype != dtype
    if is_rounded and is_widened:
        converter = Converter.BOTH
    elif is_rounded:
        converter = Converter.SENDER
    else:
        converter = Converter.RECEIVER if is_widened else Converter.NOBODY
    return Agreement(sender, receiver, wire, converter)


def _narrower(sender: KVLayout, receiver: KVLayout) -> str:
    """Of two dtypes with equally long rows (bfloat16 and float16) the receiver's."""
    return sender.dtype if sender.row_size_bytes < receiver.row_size_bytes else receiver.dtype


def _has_shorter_rows(dtype: str, layout: KVLayout) -> bool:
    """Whether a dtype makes less of rows: int8 has a scale besides, which outweighs it where heads are tiny."""
    return replace(layout, dtype=dtype).row_size_bytes < layout.row_size_bytes


def _bounds(heads: range) -> tuple[int, int]:
    return heads.start, heads.stop
