"""docs/configuration.md is what the command prints."""

from pathlib import Path

from pdserve.cli.reference import settings_reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN, END = "<!-- begin: pdserve config-reference -->\n", "<!-- end -->\n"


def test_the_tables_are_the_output_of_the_command() -> None:
    _, _, rest = DOCUMENT.read_text().partition(BEGIN)
    table, end, _ = rest.partition(END)

    assert end, "the marks are gone"
    assert table.strip() == settings_reference().strip(), "run: pdserve config-reference"
