# SPDX-License-Identifier: Apache-2.0
"""The page on design and its drawing show the rooms, files and imports that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from runpy import run_path

import keymix

SRC = Path(keymix.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "design.md").read_text(encoding="utf-8")
FIGURE = run_path(str(DOCS / "figures" / "rooms.py"))
FLOOR = {
    room: floor for floor, (rooms, _) in enumerate(FIGURE["FLOORS"]) for room in rooms.split(", ")
}
FOLDERS = {each.parent.name for each in SRC.glob("*/__init__.py")}


def imports(file: Path) -> set[str]:
    """The rooms that a file imports from."""
    found = {
        node.module.split(".")[1]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keymix.")
    }
    return found & FOLDERS


def test_the_drawing_shows_every_room() -> None:
    assert FLOOR.keys() - {"records", "task", "errors"} == FOLDERS


def test_imports_run_down_the_drawing() -> None:
    for room in FOLDERS:
        for file in (SRC / room).rglob("*.py"):
            upward = {other for other in imports(file) if FLOOR[other] < FLOOR[room]}
            assert not upward, file


def test_a_step_of_the_drawing_goes_down() -> None:
    for first, *below in FIGURE["STEPS"]:
        assert all(FLOOR[room] > FLOOR[first] for room in below)


def test_the_page_names_files_that_there_are() -> None:
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE))
    assert len(named) > 15
    planned = {name for name in named if "detection" in name or "coco" in name}
    root = SRC.parents[1]
    assert not [n for n in named - planned if not ((SRC / n).exists() or (root / n).exists())]


def test_the_page_lists_as_many_steps_as_are_drawn() -> None:
    assert len(re.findall(r"^\d+\. ", PAGE, re.M)) == len(FIGURE["STEPS"])
