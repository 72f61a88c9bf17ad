# SPDX-License-Identifier: Apache-2.0
"""Every fault in the table of reliability names tests that there are."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from documents import DOCS, ROOT

_HEADING = "## The table of faults"
_FOLDER = ROOT / "tests" / "train"  # of names without one


def selections() -> list[str]:
    """The code spans of the table's last column that begin with a file."""
    text = (DOCS / "reliability.md").read_text(encoding="utf-8").partition(_HEADING)[2]
    rows = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [row.strip("| ").rsplit("|", 1)[-1] for row in rows[2:]]
    assert len(cells) >= 18
    return [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]


def functions_of(path: Path) -> list[str]:
    """Names of the test functions of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith("test_")]


def lacking(selection: str) -> list[str]:
    """Parts of a selection that select no test; the names of ``-k`` are joined by ``or``."""
    place, *options = shlex.split(selection)
    name, *parts = place.split("::")
    path = ROOT / name if "/" in name else _FOLDER / name
    if not path.is_file():
        return [name]
    if path.parent.name == "benchmarks":
        return [] if not options and not parts else [selection]
    tests = functions_of(path)
    missing = [part for part in parts if part not in tests]
    if options:
        option, names = options
        assert option == "-k", selection
        words = names.split(" or ")
        missing += [word for word in words if not any(word in test for test in tests)]
    return missing if tests else [name]


@pytest.mark.parametrize("selection", selections())
def test_every_fault_is_seen_by_a_test(selection: str) -> None:
    assert lacking(selection) == []


@pytest.mark.parametrize(
    ("selection", "missing"),
    [
        ("test_kills.py", []),
        ("test_gone.py -k kill", ["test_gone.py"]),
        ("test_stopping.py -k second_train", ["second_train"]),
        ('test_stopping.py -k "keeps_its_folder or no_test"', ["no_test"]),
        ("tests/train/test_stopping.py::test_nothing", ["test_nothing"]),
    ],
)
def test_a_selection_without_a_test_is_noticed(selection: str, missing: list[str]) -> None:
    assert lacking(selection) == missing
