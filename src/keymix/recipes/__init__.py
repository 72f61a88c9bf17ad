# SPDX-License-Identifier: Apache-2.0
"""Recipes by name, a file for each paper's family; the folder is searched.

A recipe is a function here marked ``@recipe``. Its name is the recipe's, and its docstring is the
lab notebook: what, which paper, the command, and what it measured.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING

from keymix.errors import UserError, unknown

if TYPE_CHECKING:
    from keymix.train.recipe import Recipe

_FOUND: dict[str, Callable[[], Recipe]] = {}


def add(name: str, notebook: str, make: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Add a recipe, of which what is made takes the name."""

    def named() -> Recipe:
        return replace(make(), name=name)

    named.__doc__ = cleandoc(notebook)
    _FOUND[name] = named
    return named


def recipe(make: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Mark a function as a recipe, by its name and with its docstring as notebook."""
    return add(make.__name__, make.__doc__ or "", make)


@cache
def _all() -> dict[str, Callable[[], Recipe]]:
    for family in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{family.name}")
    return dict(sorted(_FOUND.items()))


def names() -> list[str]:
    """The names of all recipes, sorted."""
    return list(_all())


def notebook(name: str) -> str:
    """What a recipe's docstring says: paper, commands, settings, and what it measured."""
    return _known(name).__doc__ or ""


def summary(name: str) -> str:
    """The first line of a recipe's notebook."""
    return notebook(name).splitlines()[0]


def get(name: str) -> Recipe:
    """The recipe of this name; an unknown one is refused, with the nearest."""
    return _known(name)()


def resolve(text: str) -> Recipe:
    """A recipe from what a person typed: a recipe's name, a YAML or JSON file, a run's folder."""
    from keymix.train.recipe import read_recipe

    if text in _all():
        return get(text)
    path = Path(text).expanduser()
    if path.is_dir() and not (path / "recipe.json").exists():
        raise UserError(f"the folder {text!r} is no run: it holds no recipe.json.")
    if path.is_dir() or path.suffix in (".yaml", ".yml", ".json"):
        return read_recipe(path)
    raise unknown("recipe", text, names())


def _known(name: str) -> Callable[[], Recipe]:
    found = _all()
    if name not in found:
        raise unknown("recipe", name, found)
    return found[name]
