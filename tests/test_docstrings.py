# SPDX-License-Identifier: Apache-2.0
"""Blocks of arguments and errors document the public API; everything else has one good line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import keymix

SRC = Path(keymix.__file__).parent
PAGES = sorted((Path(__file__).parents[1] / "docs" / "api").glob("*.md"))
BLOCK = re.compile(r"^\s*(Args|Raises|Returns|Yields|Attributes):\s*$", re.M)
EVERYTHING = frozenset({"*"})


def listed(page: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield each module that a page of the API shows, with its names; ``*`` stands for all."""
    for entry in re.finditer(r"^::: (\S+)\n((?: {4}.*\n|\n)*)", page + "\n", re.M):
        inline = re.search(r"members:\s*\[([^\]]*)\]", entry[2])
        names = inline[1].split(",") if inline else re.findall(r"^\s+- (\w+)", entry[2], re.M)
        module, _, last = entry[1].rpartition(".")
        if SRC.joinpath(*module.split(".")[1:]).with_suffix(".py").exists():
            yield module, frozenset({last})  # the page shows one name of a module
        else:
            yield entry[1], frozenset(name.strip() for name in names) or EVERYTHING


def public_names() -> dict[str, frozenset[str]]:
    """Map modules to the names of theirs that are public: the API's pages and ``__all__``."""
    found: dict[str, frozenset[str]] = {}
    lazily = re.findall(r'"(\w+)": "(keymix[\w.]*)"', (SRC / "__init__.py").read_text("utf-8"))
    given = [each for page in PAGES for each in listed(page.read_text("utf-8"))]
    for module, names in (*given, *((where, frozenset({name})) for name, where in lazily)):
        found[module] = found.get(module, frozenset()) | names
    return found


def documented_inside(tree: ast.Module, public: frozenset[str]) -> list[str]:
    """Name what is not public and has such a block: functions, classes and their methods."""
    found = []

    def search(body: list[ast.stmt], within: str, shown: bool | None) -> None:
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            open_name = not node.name.startswith("_") or node.name.startswith("__")
            registered = any("register_" in ast.unparse(each) for each in node.decorator_list)
            if shown is None:
                is_public = node.name in public or (public >= EVERYTHING and open_name)
                is_public = is_public or registered
            else:
                is_public = shown and open_name
            if BLOCK.search(ast.get_docstring(node) or "") and not is_public:
                found.append(f"{within}{node.name}")
            if isinstance(node, ast.ClassDef):
                search(node.body, f"{within}{node.name}.", is_public)

    search(tree.body, "", None)
    return found


def test_only_the_public_api_documents_its_arguments() -> None:
    public = public_names()
    found = {}
    for file in sorted(SRC.rglob("*.py")):
        module = ".".join(("keymix", *file.relative_to(SRC).with_suffix("").parts))
        names = public.get(module.removesuffix(".__init__"), frozenset())
        inside = documented_inside(ast.parse(file.read_text("utf-8")), names)
        if inside:
            found[str(file.relative_to(SRC))] = inside
    assert not found


@pytest.mark.parametrize(
    ("public", "expected"),
    [(frozenset(), ["f", "A.g"]), (frozenset({"A"}), ["f"]), (EVERYTHING, [])],
)
def test_a_block_inside_is_found(public: frozenset[str], expected: list[str]) -> None:
    block = '"""Do.\n\n    Args:\n        x: One.\n    """'
    source = f"def f(x):\n    {block}\nclass A:\n    def g(self, x):\n        {block}\n"
    assert documented_inside(ast.parse(source), public) == expected


def test_the_pages_of_the_api_are_read() -> None:
    public = public_names()
    assert "StaticKeyAttention" in public["keymix.mixers.static_key"]
    assert public["keymix.analysis.statistics"] == EVERYTHING
    assert "compare" in public["keymix.compare.run"]
