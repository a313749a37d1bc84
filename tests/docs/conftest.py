"""The documentation as data: its tables, found by the heading above them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

Table = list[list[str]]


@pytest.fixture(scope="session")
def tables() -> Callable[[str, str], Table]:
    """Return a function from a document and a heading to the rows of every table under it, heads left out."""

    def read(document: str, heading: str) -> Table:
        text = (ROOT / document).read_text()
        start = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
        assert start, f"{document} has no heading {heading!r}"
        section = re.split(rf"^#{{1,{len(start[1])}}} ", text[start.end() :], maxsplit=1, flags=re.MULTILINE)[0]
        rows: Table = []
        for line in section.splitlines():
            if re.fullmatch(r"\|[|\- ]+", line):
                rows.pop()  # the line above was the head
            elif line.startswith("|"):
                rows.append([cell.strip() for cell in line.strip("|").split("|")])
        return rows

    return read
