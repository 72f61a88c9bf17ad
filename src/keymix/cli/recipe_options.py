# SPDX-License-Identifier: Apache-2.0
"""Recipe fields as command-line options: ``--optim.lr 1e-3``, short forms, one-line refusals."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from keymix.cli.console import VerbParser
from keymix.errors import UserError, unknown
from keymix.train.config import helps, leaves
from keymix.train.recipe import FREE, Recipe, parse_value, paths

SHORT = {
    "--data": "data.spec",
    "--limit": "data.limit",
    "--image-size": "data.image_size",
    "--model": "model.name",
    "--mixer": "model.mixer",
    "--epochs": "schedule.epochs",
}
SWITCHES = {"--skip-corrupt": "data.skip_corrupt"}  # short forms that mean true
DEFAULT = "digits_vit"
"""The recipe whose values help shows where none is named."""
COMMON = (
    "data.spec",
    "data.limit",
    "data.image_size",
    "data.batch_size",
    "data.workers",
    "data.skip_corrupt",
    "augment.flip",
    "augment.rand_augment",
    "model.name",
    "model.mixer",
    "model.options",
    "model.weights",
    "optim.lr",
    "optim.weight_decay",
    "schedule.epochs",
    "schedule.warmup_epochs",
    "loss.label_smoothing",
    "loss.mixup",
    "precision",
    "seed",
)
"""Fields that most people set; `--help` shows them, and `--help-all` every one."""
PER_RUN = frozenset({"name", "seed", "model.mixer"})
"""Fields that differ between the runs of a comparison."""
_METAVARS = {
    "data.spec": "SPEC",
    "data.image_size": "S|H,W",
    "augment.rand_augment": "N,M",
    "model.mixer": "M",
    "model.name": "NAME",
    "model.weights": "PATH",
    "precision": "P",
    int: "N",
    float: "X",
    bool: "BOOL",
    dict: "MAP",
}
"""What stands for the value of a field, or of any field of a type."""
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
    argv: Sequence[str], parser: VerbParser, *, short: Mapping[str, str] = SHORT
) -> Words:
    """Sort the words after a verb; an unknown option is refused with the nearest.

    `parser` has the verb's own options, `short` are the short forms of recipe fields.
    """
    words, fields = Words(), {f"--{path}": path for path in paths()} | dict(short)
    valued, flags = parser.own_options()
    options = [name for name in valued if name not in fields]
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            words.names.append(word)
            continue
        name, equals, value = word.partition("=")
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


def add_fields(
    parser: VerbParser,
    recipe: Recipe | None,
    *,
    everything: bool,
    without: Collection[str] = (),
) -> None:
    """Add a recipe's fields to a parser, for its help, with the recipe's values in brackets.

    Every field, or those that are `COMMON`, by the short names that they have; not those `without`
    and those for which the parser has an option.
    """
    values = None if recipe is None else flat(recipe)
    types = dict(leaves(Recipe))
    shorts = {path: name for name, path in SHORT.items()}
    switches = {path: name for name, path in SWITCHES.items()}
    own = {name for names in parser.own_options() for name in names}
    without = {*without, *(path for name, path in {**SHORT, **SWITCHES}.items() if name in own)}
    title = "One complete training run" if everything else "what is most often set"
    groups = {"": parser.add_argument_group(title)}
    for path, text in helps(Recipe):
        if path not in types:
            whole = parser.add_argument_group(text.rstrip(".")) if everything else groups[""]
            groups[path] = whole
            continue
        if path in without or not (everything or path in COMMON):
            continue
        add = groups[path.rpartition(".")[0]].add_argument
        value = "" if values is None else f" [{_shown(values[path])}]"
        said = (text if everything else _START.split(text)[0]).replace("``", "`") + value
        said = said.replace("%", "%%")  # argparse formats helps with %
        if path in switches:
            add(switches[path], action="store_true", help=said)
            said = f"false undoes {switches[path]}"
        names = [f"--{path}", *([shorts[path]] if path in shorts else [])]
        if everything or path not in switches:
            add(*names[0 if everything else -1 :], metavar=_metavar(path, types[path]), help=said)


_START = re.compile(r"(?<!e\.g)[.;](?: |$)")
"""Where the first thing that a help says ends."""


def _metavar(path: str, hint: Any) -> str:
    """Return what stands for a field's value: by its path, its type, or its name."""
    kinds = [kind for kind in get_args(hint) or [hint] if kind is not type(None)]
    kind = get_origin(hint) if get_origin(hint) is dict else kinds[0]
    return _METAVARS.get(path) or _METAVARS.get(kind) or path.rpartition(".")[2].upper()


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


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
