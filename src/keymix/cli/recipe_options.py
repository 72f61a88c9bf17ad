# SPDX-License-Identifier: Apache-2.0
"""Recipe fields as command-line options: ``--optim.lr 1e-3``, short forms, one-line refusals."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from keymix.errors import KeymixWarning, UserError, unknown
from keymix.train.config import helps
from keymix.train.recipe import FREE, Recipe, parse_value, paths, renamed_keys

SHORT = {
    "--data": "data.spec",
    "--limit": "data.limit",
    "--model": "model.name",
    "--mixer": "model.mixer",
    "--epochs": "schedule.epochs",
}
SWITCHES = {"--skip-corrupt": "data.skip_corrupt"}  # short forms that mean true
SHORT_HELP = "short forms: " + ", ".join(
    [
        *(f"{short} = --{path}" for short, path in SHORT.items()),
        *(f"{short} = --{path} true" for short, path in SWITCHES.items()),
    ]
)
_ELSEWHERE = {
    "neuron": "the neurons of a spiking model are --model.options.neuron: lif, if, plif or relu",
    "time_steps": "the time steps of a spiking model are --model.options.time_steps on images, "
    "--data.time_steps on recordings of events",
}
"""Arguments of models that are looked for elsewhere, and where they are."""


@dataclass
class Words:
    """A command line, sorted into names, the verb's own options and flags, and recipe fields.

    Options have all values that they were given, in order; fields have texts by dotted key.
    """

    names: list[str] = field(default_factory=list)
    options: dict[str, list[str]] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    fields: dict[str, str] = field(default_factory=dict)

    def last(self, option: str) -> str | None:
        """The value of an option that counts once; None if it was not given."""
        given = self.options.get(option)
        return given[-1] if given else None


def sort_words(
    argv: Sequence[str],
    *,
    options: Sequence[str],
    flags: Sequence[str],
    short: Mapping[str, str] = SHORT,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> Words:
    """Sort the words after a verb; an unknown option is refused with the nearest.

    `options` are the verb's own that take a value, `flags` those that take none, `short` the short
    forms of recipe fields, `renamed` old names of the verb's own.
    """
    words, fields = Words(), {f"--{path}": path for path in paths()} | dict(short)
    old = {f"--{path}": f"--{new}" for path, new in renamed_keys().items()} | dict(renamed)
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            words.names.append(word)
            continue
        name, equals, value = word.partition("=")
        if name in old:
            text = f"option {name} is now {old[name]}; the old name works for one more release"
            warnings.warn(text, KeymixWarning, stacklevel=2)
            name = old[name]
        if name in flags or name in SWITCHES:
            if equals:
                raise UserError(f"option {name} takes no value.")
            if name in SWITCHES:
                words.fields[SWITCHES[name]] = "true"
            else:
                words.flags.add(name)
            continue
        free = any(name.startswith(f"--{start}") and len(name) > len(start) + 2 for start in FREE)
        if name not in options and name not in fields and not free:
            argument = name[2:].rpartition(".")[2].replace("-", "_")
            if argument in _ELSEWHERE:
                raise UserError(f"unknown option {name!r}: {_ELSEWHERE[argument]}.")
            raise unknown("option", name, [*options, *flags, *SWITCHES, *fields])
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"option {name} needs a value.")
            value = rest.pop(0)
        if not value.strip():
            raise UserError(f"option {name} is empty: give it a value, or leave it out.")
        if name in options:
            words.options.setdefault(name, []).append(value)
        else:
            words.fields[fields.get(name, name[2:])] = value
    return words


def add_fields(parser: argparse.ArgumentParser, recipe: Recipe | None) -> None:
    """Add a recipe's fields to a parser, for ``--help``, with its values in brackets."""
    values = None if recipe is None else flat(recipe)
    groups = {"": parser.add_argument_group("One complete training run")}
    known = set(paths())
    for path, text in helps(Recipe):
        if path not in known:
            groups[path] = parser.add_argument_group(text.rstrip("."))
            continue
        group, _, name = path.rpartition(".")
        value = "" if values is None else f" [{_shown(values[path])}]"
        groups[group].add_argument(
            f"--{path}",
            metavar=name.upper(),
            help=f"{text}{value}".replace("%", "%%"),  # argparse formats helps with %
        )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


def flat(recipe: Recipe) -> dict[str, Any]:
    """A recipe's fields by dotted key."""
    values = recipe.to_dict()
    found: dict[str, Any] = {}
    for path in paths():
        group, _, name = path.rpartition(".")
        found[path] = values[group][name] if group else values[name]
    return found


def typed(fields: Mapping[str, str]) -> dict[str, Any]:
    """The recipe fields of a command line, by dotted key, in their types."""
    return {path: parse_value(path, text) for path, text in fields.items()}
