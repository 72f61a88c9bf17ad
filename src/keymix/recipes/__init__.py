# SPDX-License-Identifier: Apache-2.0
"""Recipes by name. A file ``recipes/<task>/<name>.py`` with ``def recipe()`` is a recipe.

The folder is searched; there is no list to edit. Each file's head is a lab notebook: what, which
paper, the command, and what it measured.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from keymix.errors import UserError, unknown

if TYPE_CHECKING:
    from keymix.train.recipe import Recipe


def _files() -> dict[str, str]:
    here = Path(__file__).parent
    return {
        file.stem: ".".join(file.relative_to(here).with_suffix("").parts)
        for file in sorted(here.glob("*/*.py"))
        if not file.stem.startswith("_")
    }


def names() -> list[str]:
    """The names of all recipes, sorted."""
    return sorted(_files())


def summary(name: str) -> str:
    """The first line of a recipe's notebook head."""
    module = importlib.import_module(f"{__name__}.{_known(name)}")
    return (module.__doc__ or "").strip().splitlines()[0]


def get(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        UserError: If there is none; it names the nearest.
    """
    module = importlib.import_module(f"{__name__}.{_known(name)}")
    made: Recipe = module.recipe()
    return made


def resolve(text: str) -> Recipe:
    """A recipe from what a person typed: a recipe's name, a YAML or JSON file, a run's folder.

    Raises:
        UserError: If it is none of these, or the file is no recipe.
    """
    from keymix.train.recipe import read_recipe

    if text in _files():
        return get(text)
    path = Path(text).expanduser()
    if path.is_dir() and not (path / "recipe.json").exists():
        raise UserError(f"the folder {text!r} is no run: it holds no recipe.json.")
    if path.is_dir() or path.suffix in (".yaml", ".yml", ".json"):
        return read_recipe(path)
    raise unknown("recipe", text, names())


def _known(name: str) -> str:
    known = _files()
    if name not in known:
        raise unknown("recipe", name, known)
    return known[name]
