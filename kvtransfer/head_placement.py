"""Where some heads of a block lie within the whole one."""

from pdserve.kvtransfer.layout import KVLayout


def place_heads(block: memoryview, layout: KVLayout, heads: range, part: memoryview, start: int = 0) -> None:
    """Copy a block of some heads, laid out like `layout` otherwise, to its places in a whole block: all of it, or the
    layers that begin at its byte `start`."""
    head_size_bytes = layout.block_size * layout.row_size_bytes
    stride, width = len(layout.heads) * head_size_bytes, len(heads) * head_size_bytes
    offset = (heads.start - layout.heads.start) * head_size_bytes
    first = start // width
    for number in range(len(part) // width):  # K and V of each layer: their heads lie together
        place = (first + number) * stride + offset
        block[place : place + width] = part[number * width : (number + 1) * width]
