"""docs/architecture.md says what the code is: every file, message, status and timeout, and no other."""

import ast
import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from pdserve.control import handover, messages
from pdserve.control.request_state import TRANSITIONS
from pdserve.kvtransfer import frames

ROOT = Path(__file__).parents[2]
DOCUMENT = "docs/architecture.md"
PACKAGES = (
    "pdserve",
    "cli",
    "gateway",
    "prefill_node",
    "decode_node",
    "control",
    "engine",
    "kernels",
    "kvtransfer",
)
MODULES_WITH_TIMEOUTS = (
    "cli.supervisor",
    "control.node_config",
    "control.request_store",
    "decode_node.config",
    "gateway.config",
    "gateway.dispatch_config",
    "kvtransfer.config",
    "prefill_node.config",
)

Tables = Callable[[str, str], list[list[str]]]


def sources() -> Iterator[str]:
    """Yield every source file that is more than a docstring."""
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if path.name != "__init__.py" or len(ast.parse(path.read_text()).body) > 1:
            yield str(path.relative_to(ROOT))


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def fields_of(message: type) -> list[str]:
    return [field.name for field in dataclasses.fields(message)]


def test_every_file_has_its_sentence_and_every_sentence_its_file(tables: Tables) -> None:
    rows = tables(DOCUMENT, "Every file in one sentence")
    described = [names_in(path)[0] for path, _ in rows]

    assert set(sources()) - set(described) == set(), "files without a row"
    assert set(described) - set(sources()) == set(), "rows without a file"
    assert len(described) == len(set(described))
    assert all(sentence.endswith(".") for _, sentence in rows)


@pytest.mark.parametrize("plane", [messages, frames])
def test_every_message_is_described_with_its_fields(tables: Tables, plane: object) -> None:
    heading = {messages: "Control plane", frames: "KV plane"}[plane]  # type: ignore[index]
    described = {names_in(row[0])[0]: names_in(row[2]) for row in tables(DOCUMENT, heading)}
    expected = {kind.__name__: fields_of(kind) for kind in get_args(plane.Message)}  # type: ignore[attr-defined]

    assert described == expected


def test_versions_are_those_of_the_code(tables: Tables) -> None:
    versions = {names_in(name)[0]: int(version) for name, version, *_ in tables(DOCUMENT, "Versions")}

    assert versions == {
        "control/messages.py": messages.PROTOCOL_VERSION,
        "kvtransfer/frames.py": frames.PROTOCOL_VERSION,
        "control/handover.py": handover.HANDOVER_VERSION,
    }


def test_the_table_of_statuses_is_the_one_that_is_enforced(tables: Tables) -> None:
    described = {names_in(row[0])[0]: set(names_in(row[1])) for row in tables(DOCUMENT, "Statuses of a request")}

    assert described == {status.name: {target.name for target in after} for status, after in TRANSITIONS.items()}


def test_every_timeout_has_its_real_default(tables: Tables) -> None:
    described = {names_in(row[0])[0]: float(row[1]) for row in tables(DOCUMENT, "Leases and timeouts")}
    actual = {}
    for name in MODULES_WITH_TIMEOUTS:
        module = importlib.import_module(f"pdserve.{name}")
        for kind in vars(module).values():
            if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind.__module__ == module.__name__:
                for field in dataclasses.fields(kind):
                    if field.name.endswith("_s") and field.default is not dataclasses.MISSING:
                        actual[f"{kind.__name__}.{field.name}"] = field.default

    assert described == actual


def test_every_test_that_holds_a_law_exists(tables: Tables) -> None:
    held = [name for row in tables(DOCUMENT, "Laws") for name in names_in(row[2])]

    assert held
    for name in held:
        path, _, function = name.partition("::")
        assert (ROOT / "tests" / path).is_file(), name
        assert not function or f"def {function}(" in (ROOT / "tests" / path).read_text(), name
