"""docs/failures.md names, for every reported failure, exactly the tests that bear its number."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[1]
NUMBER = re.compile(r"\bC\d{3}\b")
DOCUMENT = "docs/failures.md"

Tables = Callable[[str, str], list[list[str]]]


def cases_in_tests() -> dict[str, set[str]]:
    """Find the tests whose docstring, comments or parameters name a case."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(TESTS.rglob("test_*.py")):
        if path.parent == Path(__file__).parent:
            continue
        source = path.read_text()
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                for case in NUMBER.findall("\n".join(lines[first - 1 : node.end_lineno])):
                    found[case].add(f"{path.relative_to(TESTS)}::{node.name}")
    return dict(found)


def test_the_table_names_exactly_the_tests_that_bear_the_number(tables: Callable[[str, str], list[list[str]]]) -> None:
    rows = tables(DOCUMENT, "Cases and their tests")
    described = {case: set(re.findall(r"`([^`]+)`", tests)) for case, _, _, tests in rows}

    assert described == cases_in_tests()


def test_every_case_has_a_description_and_a_public_source(tables: Tables) -> None:
    rows = tables(DOCUMENT, "Cases and their tests")

    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    for case, description, source, _ in rows:
        assert description, case
        assert re.search(r"\[[\w.-]+/[\w.-]+#\d+\]\(https://github\.com/", source), case
