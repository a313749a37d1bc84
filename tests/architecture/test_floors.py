"""The architecture as a test: imports go down only, and every file stays small enough to be read."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ALLOWED_IMPORTS = {
    "cli": {"gateway", "prefill_node", "decode_node", "control", "engine", "kvtransfer"},
    "gateway": {"control", "engine"},
    "prefill_node": {"control", "engine", "kvtransfer"},
    "decode_node": {"control", "engine", "kvtransfer"},
    "control": {"engine", "kvtransfer"},
    "engine": {"kernels"},
    "kernels": set(),
    "kvtransfer": set(),
}
ENGINE_MODULES_WITHOUT_TORCH = {
    "errors",
    "follower",
    "sampling_params",
    "tokenizer",
    "detokenizer",
    "stop_strings",
    "chat_template",
    "step_output",
    "block_pool",
    "bad_words",
    "ranking",
    "sampling_defaults",
    "structured_outputs",
    "gbnf",
    "closed_schema",
    "grammar_source",
    "grammar_state",
    "grammar_compiler",
    "grammar_thread",
}
# What may be imported where: torch and its kin from the engine down, ZeroMQ on the two planes.
HEAVY_LIBRARIES = {"torch", "triton", "transformers", "safetensors", "gguf", "accelerate", "numpy"}
HOMES_OF_HEAVY_LIBRARIES = {"engine", "kernels", "prefill_node", "decode_node"}
HOMES_OF_NUMPY = {"kvtransfer/block_cutter.py", "kvtransfer/rows.py"}  # loaded only where blocks are converted
HOME_OF_ENVIRONMENT = {"engine/environment.py"}  # beside the command line
HOMES_OF_ZEROMQ = {"control", "kvtransfer"}
PUBLIC_NAMES = {
    "__version__",
    "LLM",
    "GuidedDecodingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
}
MEANINGLESS_NAMES = {"utils", "common", "core", "helpers", "misc"}
MAX_LINES = 450

SOURCES = sorted(path for package in ALLOWED_IMPORTS for path in (ROOT / package).rglob("*.py"))


def imported_modules(source: str) -> Iterator[str]:
    """Yield the absolute dotted name of everything `source` imports, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the floor they reach"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def imports_where(is_wrong: Callable[[Path, list[str]], bool]) -> list[str]:
    """Return "file imports name" for each import that is wrong."""
    return [
        f"{relative(path)} imports {name}"
        for path in SOURCES
        for name in imported_modules(path.read_text(encoding="utf-8"))
        if is_wrong(path, name.split("."))
    ]


def test_every_package_has_sources() -> None:
    assert {package_of(path) for path in SOURCES} == set(ALLOWED_IMPORTS)


def test_imports_go_down_only_and_siblings_do_not_know_each_other() -> None:
    def is_wrong(path: Path, name: list[str]) -> bool:
        package = package_of(path)
        return name[0] == "pdserve" and name[1] not in ALLOWED_IMPORTS[package] | {package} | PUBLIC_NAMES

    assert imports_where(is_wrong) == []


def test_public_names_are_imported_by_the_command_line_only() -> None:
    assert imports_where(lambda path, name: name[0] == "pdserve" and _is_public_use(path, name)) == []


def _is_public_use(path: Path, name: list[str]) -> bool:
    return name[1] in PUBLIC_NAMES - {"__version__"} and package_of(path) != "cli"


def test_import_root_is_pdserve() -> None:
    roots = set(ALLOWED_IMPORTS)

    assert imports_where(lambda path, name: name[0] in roots) == []


def test_heavy_libraries_stay_in_engine_and_below() -> None:
    def is_wrong(path: Path, name: list[str]) -> bool:
        if name[0] == "numpy" and relative(path) in HOMES_OF_NUMPY:
            return False
        return name[0] in HEAVY_LIBRARIES and not {package_of(path), relative(path)} & HOMES_OF_HEAVY_LIBRARIES

    assert imports_where(is_wrong) == []


def test_zeromq_stays_on_the_two_planes() -> None:
    """Whoever opens channels may make and close their context; sockets and frames stay below."""

    def uses_zeromq(path: Path) -> set[str]:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        return {name for node in nodes if (name := _dotted(node)).startswith("zmq.")}

    outside = {relative(path): uses_zeromq(path) for path in SOURCES if package_of(path) not in HOMES_OF_ZEROMQ}

    assert {name: used for name, used in outside.items() if used - {"zmq.asyncio", "zmq.asyncio.Context"}} == {}


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_gateway_uses_only_the_torch_free_modules_of_the_engine() -> None:
    def is_wrong(path: Path, name: list[str]) -> bool:
        is_engine = package_of(path) == "gateway" and name[:2] == ["pdserve", "engine"]
        return is_engine and name[2] not in ENGINE_MODULES_WITHOUT_TORCH

    assert imports_where(is_wrong) == []


def test_torch_free_modules_of_the_engine_import_only_each_other() -> None:
    def is_wrong(path: Path, name: list[str]) -> bool:
        if path.parent != ROOT / "engine" or path.stem not in ENGINE_MODULES_WITHOUT_TORCH:
            return False
        is_outside = name[:2] == ["pdserve", "engine"] and name[2] not in ENGINE_MODULES_WITHOUT_TORCH
        return name[0] in HEAVY_LIBRARIES or is_outside

    assert imports_where(is_wrong) == []


def test_package_inits_are_bare_docstrings() -> None:
    """`kvtransfer` excepted: a library of its own, it names what others may use."""
    inits = [path for path in SOURCES if path.name == "__init__.py" and package_of(path) != "kvtransfer"]
    bodies = {relative(path): ast.parse(path.read_text(encoding="utf-8")).body for path in inits}

    assert [name for name, body in bodies.items() if len(body) != 1 or not isinstance(body[0], ast.Expr)] == []


def test_files_are_named_for_what_they_are() -> None:
    parts = {relative(path): set(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES}

    assert [name for name, words in parts.items() if words & MEANINGLESS_NAMES] == []


def test_files_can_be_read_in_one_sitting() -> None:
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}

    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_environment_is_read_by_the_command_line_and_in_one_other_place() -> None:
    def reads_environment(path: Path) -> bool:
        return any(_is_environment(node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))

    readers = {relative(path) for path in SOURCES if package_of(path) != "cli" and reads_environment(path)}
    assert readers == HOME_OF_ENVIRONMENT


def _is_environment(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return False
    return node.value.id == "os" and node.attr in ("environ", "getenv", "putenv")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn as nn", ["torch.nn"]),
        ("def f():\n    from pdserve.engine import llm", ["pdserve.engine.llm"]),
        ("from pdserve import LLM", ["pdserve.LLM"]),
    ],
)
def test_import_is_seen_wherever_it_stands(source: str, expected: list[str]) -> None:
    assert list(imported_modules(source)) == expected
