# SPDX-License-Identifier: Apache-2.0
"""The reference documents every class that a public function takes or returns, fields included."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

from documents import DOCS

import keymix

DIRECTIVE = re.compile(r"^::: (\S+)\n((?:    .*\n|\n(?=    ))*)", re.MULTILINE)


def documented() -> dict[str, list[str] | None]:
    """Return what the pages show: a name's members, None for all of them."""
    found: dict[str, list[str] | None] = {}
    for page in (DOCS / "api").glob("*.md"):
        for name, options in DIRECTIVE.findall(page.read_text(encoding="utf-8") + "\n"):
            listed = options.partition("members:")[2]
            found[name] = re.findall(r"\w+", listed) if listed else None
    return found


def is_shown(kind: type, pages: dict[str, list[str] | None]) -> bool:
    if f"{kind.__module__}.{kind.__qualname__}" in pages:
        return True
    members = pages.get(kind.__module__, [])
    return members is None or kind.__name__ in members


def classes(hint: Any) -> Iterator[type]:
    if isinstance(hint, list):  # the arguments of a Callable
        for each in hint:
            yield from classes(each)
    elif inspect.isclass(hint) and hint.__module__.startswith("keymix."):
        yield hint
    for each in typing.get_args(hint):
        yield from classes(each)


def hints_of(thing: Any) -> dict[str, Any]:
    """Resolve annotations, with what their module imports for type checking alone."""
    tree = ast.parse(inspect.getsource(importlib.import_module(thing.__module__)))
    late: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("__future__"):
            module = importlib.import_module(node.module or "")
            there = (each.name for each in node.names if hasattr(module, each.name))
            late |= {name: getattr(module, name) for name in there}
    return typing.get_type_hints(thing, localns=late)


def public(name: str) -> Any:
    found = getattr(keymix, name)
    if not inspect.ismodule(found):
        return found
    room = {"train": "engine"}.get(name, "run")
    return getattr(importlib.import_module(f"keymix.{name}.{room}"), name)


def test_every_class_that_a_public_function_takes_or_returns_is_on_a_page() -> None:
    pages = documented()
    missing, seen = {}, set()
    waiting: list[tuple[type, str]] = []
    for name in (each for each in keymix.__all__ if not each.startswith("_")):
        thing = public(name)
        if inspect.isclass(thing):
            waiting.append((thing, name))
        else:
            waiting += [(each, name) for hint in hints_of(thing).values() for each in classes(hint)]
    while waiting:
        kind, why = waiting.pop()
        if kind in seen:
            continue
        seen.add(kind)
        if not is_shown(kind, pages):
            missing[f"{kind.__module__}.{kind.__qualname__}"] = why
        if dataclasses.is_dataclass(kind):
            for field, hint in hints_of(kind).items():
                waiting += [(each, f"{why}: {kind.__name__}.{field}") for each in classes(hint)]
    assert not missing
    assert len(seen) > 60  # the walk goes somewhere


def test_every_documented_name_exists() -> None:
    for name, members in documented().items():
        try:
            thing = importlib.import_module(name)
        except ModuleNotFoundError:
            module, _, member = name.rpartition(".")
            thing = getattr(importlib.import_module(module), member)
        lacking = [each for each in members or () if not hasattr(thing, each)]
        assert not lacking, name
