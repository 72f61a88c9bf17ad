# SPDX-License-Identifier: Apache-2.0
"""The house keeps its order: imports run downward, light things load lightly, files stay short."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
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
    "data",
    "analysis",
    "train",
    "recipes",
    "report",
    "tasks",
    "swap",
    "compare",
    "studies",
    "export",
    "cli",
]
TOP = {"arguments", "errors", "records", "task", "weights_file", "_lazy", "_version"}
LOOKED_UP = {("task", "keymix.tasks"), ("arguments", "keymix.train.predict")}
"""What a module at the top opens by name: tasks, and the folder of a run."""
HEAVY = (
    "torch",
    "torchvision",
    "timm",
    "lightning_fabric",
    "matplotlib",
    "sklearn",
    "scipy",
    "pyarrow",
)


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def room_of(file: Path) -> str:
    """Name the room of a file; a module at the top is its own."""
    return file.relative_to(SRC).with_suffix("").parts[0]


def module(file: Path) -> str:
    parts = ("keymix", *file.relative_to(SRC).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module(file): file for file in FILES}


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
        if other in TOP or other.startswith("__") or (own, name) in LOOKED_UP:
            continue
        if other not in ROOMS:
            found.append(f"{file.name}:{line}: {name} goes through the package's top")
        elif own in TOP:
            found.append(f"{file.name}:{line}: {own} stands above all rooms but imports {name}")
        elif ROOMS.index(other) > ROOMS.index(own):
            found.append(f"{file.name}:{line}: {own} imports {name} from a later room")
    return found


def imported_files(tree: ast.Module) -> set[str]:
    """Name the modules that a file imports: at its top, within functions and for type checking.

    A name out of a package counts as the package, and as the module too if it is one; out of
    keymix itself, which offers every public name late, as the module alone.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {node.module} - {"keymix"}
    return found & MODULES.keys()


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """Name files that import one another in a circle; none if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def test_no_files_import_one_another_in_a_circle() -> None:
    graph = {name: imported_files(parsed(file)) - {name} for name, file in MODULES.items()}
    assert not cycle_in(graph)


@pytest.mark.parametrize(
    "line",
    [
        "from keymix.train.runs import Run",
        "from keymix.train import runs",
        "def f():\n    import keymix.train.runs",
        "if TYPE_CHECKING:\n    from keymix.train.runs import Run",
    ],
)
def test_a_circle_is_found(line: str) -> None:
    graph = {
        "keymix.train.evaluation": imported_files(ast.parse(line)),
        "keymix.train.runs": imported_files(ast.parse("from keymix.train.evaluation import f")),
    }
    assert cycle_in(graph)


def test_a_name_out_of_a_package_counts_as_the_package() -> None:
    assert imported_files(ast.parse("from keymix.data import Loader")) == {"keymix.data"}


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


SHORT = {
    "__main__.py": "runs the package",
    "_lazy.py": "every room's names depend on it, and on nothing else",
    "_version.py": "read by the build",
    "analysis/threads.py": "one rule, shared by measuring, training and comparing",
    "cli/report.py": "a verb",
    "cli/scores.py": "shared by two verbs",
    "data/formats/nifti.py": "a format of volumes",
    "data/sources/digits.py": "a source",
    "layers/checkpoint.py": "shared by three rooms",
    "layers/spiking_block.py": "shared by embeddings, stages and mixers",
    "mixers/efficient.py": "a mixer",
    "mixers/identity.py": "a mixer",
    "mixers/kernel.py": "shared by three mixers",
    "mixers/linear.py": "a mixer",
    "mixers/qk_channel.py": "a mixer",
    "mixers/qk_token.py": "a mixer",
    "mixers/softmax.py": "a mixer",
    "ops/attention/reference.py": "an equation, and nothing else",
    "ops/attention/small_maps.py": "one measured rule",
    "recipes/imagenet.py": "shared by three papers",
    "report/checked.py": "loads without torch, as records do",
    "report/sections/collapse.py": "a section of the report",
    "report/sections/gallery.py": "a section of the report",
    "report/sections/start.py": "a section of the report",
    "report/sections/tuning.py": "a section of the report",
    "tasks/classification/facts.py": "a part of a task",
    "weights_file.py": "a format, shared by two rooms",
}
"""Files under 60 lines, each with its reason."""


def test_a_short_file_has_a_reason() -> None:
    lines = {str(f.relative_to(SRC)): f.read_text("utf-8").count("\n") for f in FILES}
    short = {name for name, n in lines.items() if n < 60 and not name.endswith("__init__.py")}
    assert short == SHORT.keys()


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


UNTYPED = re.compile(r"\b(?:Mapping|dict)\[str, (?:Any|object)\]")


OPEN_ROOMS = {"layers", "mixers", "hosts", "models"}
"""Options of mixers and models, and timm's ``pretrained_cfg``, are open by their nature."""
ALLOWED = {
    # options of mixers and models, on their way into these rooms
    "analysis/capture.py": 3,
    "analysis/mixer_alone.py": 4,
    "analysis/memory.py": 1,
    "cli/recipe_options.py": 2,
    "compare/costs.py": 1,
    "compare/question.py": 2,
    "swap/calibration.py": 1,
    "swap/plans.py": 1,
    "train/exported.py": 1,
    "train/recipe.py": 7,
    # what the codec reads and writes, and plain data of the public API
    "analysis/counting.py": 1,
    "analysis/measure.py": 1,
    "analysis/spikes_record.py": 2,
    "cli/comparison.py": 1,
    "cli/index.py": 2,
    "compare/run.py": 1,
    "report/page.py": 1,
    "report/record.py": 2,
    "swap/report.py": 1,
    "swap/record.py": 1,
    "swap/result.py": 1,
    "train/config.py": 3,
    "train/files.py": 1,
    "train/runs.py": 1,
    # the plain data of a result, and what its page's template reads
    "report/result.py": 2,
    "export/result.py": 1,
    "studies/attention/result.py": 2,
    "studies/collapse/result.py": 3,
    "studies/spikes/result.py": 2,
    # what a check of data found, which `keymix data check --json` prints
    "data/findings.py": 2,
    # keyword arguments, states and calls, whose form torch or a caller sets
    "records.py": 1,
    "data/events/cache.py": 1,
    "data/specs.py": 1,
    "swap/drift.py": 2,
    "train/checkpoints.py": 2,
    "train/loop.py": 1,
    "train/losses.py": 3,
    "train/nonfinite.py": 2,
    "train/ranks.py": 1,
    "train/resume.py": 1,
    "train/step.py": 2,
    "tasks/classification/training.py": 2,
    "train/task.py": 2,
}
"""Untyped mappings in signatures and fields that a file has; a smaller number is written here."""


def untyped(tree: ast.Module) -> list[str]:
    """Name public functions, once a parameter or result, and fields that are untyped mappings.

    Names that a module gives to such a type count as the type.
    """
    names = [
        node.targets[0].id
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and UNTYPED.search(ast.unparse(node.value))
    ]
    alias = re.compile(rf"\b(?:{'|'.join(names)})\b") if names else None

    def is_untyped(annotation: ast.expr | None) -> bool:
        text = "" if annotation is None else ast.unparse(annotation)
        return bool(UNTYPED.search(text) or (alias and alias.search(text)))

    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name.startswith("_") and not node.name.startswith("__"):
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            types = [*(each.annotation for each in given), node.returns]
            found += [node.name for each in types if is_untyped(each)]
        elif isinstance(node, ast.ClassDef):
            fields = (each for each in node.body if isinstance(each, ast.AnnAssign))
            found += [
                f"{node.name}.{ast.unparse(f.target)}" for f in fields if is_untyped(f.annotation)
            ]
    return found


def test_records_between_rooms_are_typed() -> None:
    found = Counter({str(file.relative_to(SRC)): len(untyped(parsed(file))) for file in FILES})
    free = {name for name in found if room_of(SRC / name) in OPEN_ROOMS}
    counted = {name: number for name, number in found.items() if number and name not in free}
    assert counted == ALLOWED, "untyped mappings in public signatures or fields"


@pytest.mark.parametrize(
    "line",
    [
        "def f(x: Mapping[str, Any]) -> None: ...",
        "def f() -> list[dict[str, object]]: ...",
        "Row = dict[str, Any]\ndef f(x: Row | None) -> None: ...",
        "class A:\n    x: dict[str, Any]",
        "class A:\n    def f(self, *, x: Mapping[str, Any]) -> None: ...",
    ],
)
def test_an_untyped_mapping_is_found(line: str) -> None:
    assert len(untyped(ast.parse(line))) == 1


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
