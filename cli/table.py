"""Rows of text in columns, for people at a terminal."""

from collections.abc import Sequence


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return one line a row, each column as wide as its widest text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
