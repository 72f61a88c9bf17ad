# SPDX-License-Identifier: Apache-2.0
"""Count where source names a task or branches on it, or on a kind of input.

``python tests/seams.py [SRC]`` prints the sites of a source tree, the package's own by default.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

OF_A_TASK = {"CLASSIFICATION", "SEGMENTATION", "is_masks", "takes_scans", "load_scans", "Scans"}
"""Names that are one task's own."""
OF_A_KIND = {"is_events", "of_data", "takes_frames", "load_frames", "RECORDING", "SLICES"}
_RECORDS = {"data", "seen", "record", "images"}
"""What data and their records are called; a model's own time steps are no kind of input."""
TASKS = {"classification", "segmentation"}
FREE_OF_TASKS = ("tasks/", "recipes/", "decoders/", "data/sources/")
"""What a task brings."""
FREE_OF_KINDS = ("data/", *FREE_OF_TASKS)
"""What a kind of input brings, too."""
_DECLARES = re.compile(r"^    task: ClassVar\[str\] = ", re.MULTILINE)


def docstrings(tree: ast.AST) -> set[int]:
    """Identify the constants that stand alone: docstrings, of attributes too."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def _is_none(node: ast.Compare) -> str:
    """Name what is compared with None by identity; nothing for other comparisons."""
    alone = len(node.ops) == 1 and isinstance(node.ops[0], (ast.Is, ast.IsNot))
    right = node.comparators[0]
    if not alone or not isinstance(right, ast.Constant) or right.value is not None:
        return ""
    return node.left.attr if isinstance(node.left, ast.Attribute) else ast.unparse(node.left)


def _name(node: ast.AST) -> str:
    """Name what a node loads."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) else ""


def task_sites(tree: ast.Module) -> Iterator[str]:
    """Yield where a task is named, or branched on."""
    prose = docstrings(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and node.value in TASKS and id(node) not in prose:
            yield f"line {line}: {node.value!r}"
        elif isinstance(node, ast.Compare) and _is_none(node) in ("masks", "scans"):
            yield f"line {line}: {ast.unparse(node)}"
        elif (name := _name(node)) in OF_A_TASK or (
            name == "scans" and isinstance(node, ast.Attribute)
        ):
            yield f"line {line}: {name}"


def kind_sites(tree: ast.Module) -> Iterator[str]:
    """Yield where a kind of input is named, or branched on."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Compare) and _is_none(node) == "time_steps":
            if ast.unparse(node.left).split(".")[0] in _RECORDS:
                yield f"line {line}: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute) and node.attr == "events":
            yield f"line {line}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and _name(node.func) == "named":
            if any(each.arg == "events" for each in node.keywords):
                yield f"line {line}: {ast.unparse(node)}"
        elif (name := _name(node)) in OF_A_KIND:
            yield f"line {line}: {name}"


def counted(src: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Count the sites by file: of tasks, and of kinds of input."""
    tasks, kinds = Counter[str](), Counter[str]()
    for file in sorted(src.rglob("*.py")):
        name, text = file.relative_to(src).as_posix(), file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        declares = name.startswith("models/") and _DECLARES.search(text)
        if not name.startswith(FREE_OF_TASKS) and not declares:
            tasks[name] = sum(1 for _ in task_sites(tree))
        if not name.startswith(FREE_OF_KINDS):
            kinds[name] = sum(1 for _ in kind_sites(tree))
    return +tasks, +kinds


def main() -> None:
    """Print the sites by file and their sums."""
    src = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "src" / "keymix"
    for what, sites in zip(("task", "kind of input"), counted(src), strict=True):
        rows = "\n".join(f'    "{name}": {number},' for name, number in sites.items())
        sys.stdout.write(f"{what}: {sum(sites.values())} sites in {len(sites)} files\n{rows}\n")


if __name__ == "__main__":
    main()
