"""Every relative link of the documentation leads to a file, and every flag it names exists."""

import re
from pathlib import Path

import pytest

from pdserve.cli import bench, estimate
from pdserve.cli.reference import settings_reference

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
FOREIGN_FLAGS = {
    "--bind",
    "--build",
    "--concurrency",
    "--curve",
    "--lengths",
    "--prompt",
    "--config",
    "--help",
    "--kv-unified",
    "--requirepass",
    "--scale",
    "--strict",
}  # of others, or of no setting


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)|src=\"([^\"]+)\"", document.read_text())

    for target in (first or second for first, second in targets):
        if "://" not in target:
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_flags_exist(document: Path) -> None:
    known = set(re.findall(r"`(--[a-z-]+)`", settings_reference()))
    known |= {f"--{name.replace('_', '-')}" for name in (*estimate.OPTIONS, *bench.OPTIONS)}
    known |= {flag for script in SCRIPTS for flag in re.findall(r'"(--[a-z][a-z-]+)"', script.read_text())}

    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", document.read_text()))

    assert named <= known | FOREIGN_FLAGS
