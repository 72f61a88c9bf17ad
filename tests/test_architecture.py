# SPDX-License-Identifier: Apache-2.0
"""The house keeps its order: imports run downward, light things load lightly, files stay short."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import keymix
from keymix.cli import VERBS

SRC = Path(keymix.__file__).parent
ROOT = Path(__file__).parents[1]
FILES = sorted(SRC.rglob("*.py"))
ALL_FILES = [
    file
    for file in (*FILES, *sorted(ROOT.glob("tests/**/*.py")), *sorted(ROOT.glob("benchmarks/*.py")))
    if "__pycache__" not in file.parts
]

# a room may import from rooms before it, and every room from the modules at the top
ROOMS = [
    "ops",
    "layers",
    "mixers",
    "hosts",
    "decoders",
    "models",
    "analysis",
    "surgery",
    "data",
    "train",
    "recipes",
    "report",
    "compare",
    "export",
    "cli",
]
TOP = {"errors", "records", "_lazy", "_version"}
HEAVY = ("torch", "torchvision", "timm", "lightning", "matplotlib", "sklearn", "scipy", "pyarrow")


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def room_of(file: Path) -> str:
    """Name the room of a file; a module at the top is its own."""
    return file.relative_to(SRC).with_suffix("").parts[0]


def docstrings(tree: ast.AST) -> set[int]:
    """Identify the constants that are docstrings."""
    return {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of each keymix module a file imports or names in a string.

    Imports inside functions and strings such as ``"keymix.train.engine"``, which are imported
    late, count like those at the top.
    """
    prose = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            if node.module == "keymix":
                yield from ((node.lineno, f"keymix.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            late = re.fullmatch(r"(keymix(\.\w+)+)(:\w+)?", node.value)
            if late and id(node) not in prose:
                yield node.lineno, late[1]


def violations(file: Path, tree: ast.Module) -> list[str]:
    own, found = room_of(file), []
    for line, name in imported(tree):
        parts = name.split(".")
        if parts[0] != "keymix" or len(parts) < 2:
            continue
        other = parts[1]
        if other in TOP or other.startswith("__"):
            continue
        if other not in ROOMS:
            found.append(f"{file.name}:{line}: {name} goes through the package's top")
        elif own in TOP:
            found.append(f"{file.name}:{line}: {own} stands above all rooms but imports {name}")
        elif ROOMS.index(other) > ROOMS.index(own):
            found.append(f"{file.name}:{line}: {own} imports {name} from a later room")
    return found


def test_every_folder_is_a_room_of_the_plan() -> None:
    folders = {f.name for f in SRC.iterdir() if f.is_dir() and f.name != "__pycache__"}
    assert folders <= set(ROOMS)
    assert {f.stem for f in SRC.glob("*.py")} == TOP | {"__init__", "__main__"}


def test_imports_run_downward_only() -> None:
    # the top offers every public name, late
    below = [file for file in FILES if room_of(file) not in ("__init__", "__main__")]
    assert not [found for file in below for found in violations(file, parsed(file))]


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("mixers", "from keymix.models import create_model"),
        ("mixers", "def f():\n    import keymix.train.engine"),
        ("hosts", "x = attach(__name__, {'y': 'keymix.compare.run'})"),
        ("errors", "from keymix.mixers import base"),
        ("ops", "from keymix import create_model"),
        ("report", "from keymix import compare"),
    ],
)
def test_an_upward_import_is_found(room: str, line: str) -> None:
    file = SRC / (f"{room}.py" if room in TOP else f"{room}/some.py")
    assert len(violations(file, ast.parse(line))) == 1


def shortcomings(file: Path) -> list[str]:
    """Name what a file lacks or has too much of: lines, licence, docstring."""
    lines = file.read_text(encoding="utf-8").splitlines()
    if not lines and file.name == "__init__.py" and "tests" in file.parts:
        return []
    found = []
    if len(lines) > 700:
        found.append(f"{file}: {len(lines)} lines")
    if lines[:1] != ["# SPDX-License-Identifier: Apache-2.0"]:
        found.append(f"{file}: no licence in its first line")
    if "tests" not in file.parts and not ast.get_docstring(parsed(file)):
        found.append(f"{file}: no docstring")
    return found


def test_files_are_short_and_licensed() -> None:
    assert len(ALL_FILES) > len(FILES) > 100
    assert not [found for file in ALL_FILES for found in shortcomings(file)]


def test_a_long_bare_file_is_found(tmp_path: Path) -> None:
    file = tmp_path / "bare.py"
    file.write_text("x = 1\n" * 701, encoding="utf-8")
    assert len(shortcomings(file)) == 3


def habits(tree: ast.Module) -> list[str]:
    """Name what the house style leaves out, by line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("print", "breakpoint", "eval", "exec"):
                found.append(f"line {node.lineno}: {node.func.id}()")
        elif isinstance(node, ast.ExceptHandler):
            caught = "" if node.type is None else ast.unparse(node.type)
            if not caught or re.search(r"\b(Base)?Exception\b", caught):
                found.append(f"line {node.lineno}: except {caught or 'anything'}")
        elif isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names):
            found.append(f"line {node.lineno}: star import")
        elif isinstance(node, ast.Assert) and not narrows(node.test):
            found.append(f"line {node.lineno}: assert, which -O takes away; raise an error")
        elif isinstance(node, ast.Global):
            found.append(f"line {node.lineno}: global")
    return found


def narrows(test: ast.expr) -> bool:
    """Say whether an assertion only tells the type checker a type."""
    if isinstance(test, ast.BoolOp):
        return all(narrows(value) for value in test.values)
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)


def test_the_source_keeps_the_house_style() -> None:
    assert not {str(file): found for file in FILES if (found := habits(parsed(file)))}


@pytest.mark.parametrize(
    "bad",
    [
        "print(1)",
        "try:\n    f()\nexcept:\n    pass",
        "try:\n    f()\nexcept (ValueError, Exception):\n    pass",
        "assert x > 0",
        "from a import *",
    ],
)
def test_a_bad_habit_is_found(bad: str) -> None:
    assert len(habits(ast.parse(bad))) == 1


def heavy_after(statements: str) -> list[str]:
    """Run statements in a fresh interpreter and list which heavy packages they brought in."""
    report = (
        "\nimport json, sys\n"
        f"sys.stderr.write(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", statements + report],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    heavy: list[str] = json.loads(done.stderr.strip().splitlines()[-1])
    return heavy


def module(file: Path) -> str:
    parts = ("keymix", *file.relative_to(SRC).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


LIGHT = [
    "keymix",
    *(module(f) for f in sorted(SRC.glob("cli/*.py"))),
    *(module(f) for f in sorted(SRC.glob("recipes/**/*.py"))),
    *(f"keymix.{room}" for room in ROOMS if room != "models" and (SRC / room).is_dir()),
    "keymix.train.recipe",
    "keymix.data.augment",
    "keymix.data.specs",
]


def test_the_light_modules_do_not_import_torch() -> None:
    heavy = heavy_after("\n".join(f"import {name}" for name in LIGHT))
    if not heavy:
        return
    guilty = {name: heavy_after(f"import {name}") for name in LIGHT}
    assert not {name: found for name, found in guilty.items() if found}


def test_every_verb_has_its_file() -> None:
    files = {verb: SRC / "cli" / f"{verb.replace('-', '_')}.py" for verb in VERBS}
    missing = [verb for verb, file in files.items() if not file.exists()]
    assert not missing


def test_help_is_enough_and_quick() -> None:
    heavy = heavy_after(
        "import contextlib, io, sys\n"
        "from keymix.cli import main\n"
        f"for verb in {['', *VERBS]!r}:\n"
        "    text = io.StringIO()\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):\n"
        "        main([verb, '--help'] if verb else ['--help'])\n"
        "    assert 'usage: keymix' in text.getvalue() and len(text.getvalue()) > 200, verb\n"
        f"    loaded = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "    assert not loaded, (verb, loaded)"
    )
    assert not heavy
