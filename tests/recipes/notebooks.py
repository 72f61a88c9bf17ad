# SPDX-License-Identifier: Apache-2.0
"""The commands in a recipe's notebook, and the recipes that they ask for."""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from keymix import recipes
from keymix.train.recipe import Recipe, paths, replace_path

SHORT = {"--data": "data.spec", "--model": "model.name", "--mixer": "model.mixer"}


def commands(name: str) -> dict[str, list[str]]:
    """The `keymix train` lines of a notebook, by what they call their folder."""
    text = recipes.notebook(name).replace("\\\n", "")
    lines = re.findall(r"^ +keymix train .*$", text, re.MULTILINE)
    words = [shlex.split(line) for line in lines]
    return {line[line.index("--out") + 1]: line[2:] for line in words}


def as_typed(words: list[str]) -> Recipe:
    """The recipe that a command asks for."""
    pairs = dict(zip(words[1::2], words[2::2], strict=True))
    del pairs["--out"]
    overrides: dict[str, Any] = {}
    for option, value in pairs.items():
        key = SHORT.get(option, option.removeprefix("--"))
        assert key in paths() or key.startswith("model.options."), option
        overrides[key] = yaml.safe_load(value) if key.startswith("model.options.") else value
    return replace_path(recipes.get(words[0]), overrides)
