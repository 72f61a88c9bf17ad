# SPDX-License-Identifier: Apache-2.0
"""``keymix completion``: a script with which a shell completes verbs, options and names.

The script is made of the verbs' parsers by shtab and is complete in itself: no Python runs when a
person presses Tab.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Mapping
from typing import Any

from keymix.cli import VERBS, console, index
from keymix.cli.console import VerbParser
from keymix.cli.list import KINDS

_DESCRIPTION = """\
Print the script with which a shell completes keymix's verbs and options, and
the names of recipes, models, mixers and data sets. Print it again after an
update of keymix."""

_EXAMPLES = """\
examples:
  mkdir -p ~/.local/share/bash-completion/completions
  keymix completion bash > ~/.local/share/bash-completion/completions/keymix
  mkdir -p ~/.zfunc; keymix completion zsh > ~/.zfunc/_keymix
  mkdir -p ~/.config/fish/completions
  keymix completion fish > ~/.config/fish/completions/keymix.fish

A new shell knows it: bash with the package bash-completion; zsh if ~/.zshrc
has `fpath=(~/.zfunc $fpath); autoload -Uz compinit; compinit`."""

_FILES = ("RUN", "DIR", "PATH", "FILE", "FILE.py", "IMAGE", "IMAGES")
"""What stands for a value that is a file or a folder."""


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(prog="keymix completion", description=_DESCRIPTION, epilog=_EXAMPLES)
    made.add_argument("shell", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    return made


def main(argv: list[str]) -> int:
    """Run ``keymix completion``."""
    shell: str = parser().parse_args(argv).shell
    import shtab

    console.say(shtab.complete(_whole(), shell))
    return 0


def all_parsers() -> dict[str, VerbParser]:
    """Return the parser of every command line, by the words after ``keymix``."""
    found: dict[str, VerbParser] = {}
    for verb in VERBS:
        module: Any = importlib.import_module(f"{__package__}.{verb.replace('-', '_')}")
        several = hasattr(module, "parsers")
        found |= module.parsers() if several else {verb: module.parser()}
    return found


def _whole() -> argparse.ArgumentParser:
    """Put all parsers below one, as shtab takes them."""
    top = argparse.ArgumentParser(prog="keymix", description="Compare token mixers.")
    verbs, within, names = top.add_subparsers(), dict[str, Any](), _names()
    for words, made in all_parsers().items():
        verb, _, name = words.partition(" ")
        place, about = verbs, VERBS[verb]
        if name:
            if verb not in within:
                within[verb] = verbs.add_parser(verb, help=about).add_subparsers()
            place, about = within[verb], _begins(made.description or name)
        shown = place.add_parser(name or verb, parents=[made], add_help=False, help=about)
        for action in shown._actions:
            _complete(action, names)
    return top


def _begins(description: str) -> str:
    """Return how a description begins, as far as one line of a list has room for it."""
    return " ".join(re.split(r"[.:,(]", description)[0].split())


def _complete(action: argparse.Action, names: Mapping[str, list[str]]) -> None:
    """Say how shtab completes the value of an option or argument: one of names, or a file."""
    if action.help == argparse.SUPPRESS:
        action.help = str(action.metavar)
    if taken := {action.dest, *action.option_strings} & names.keys():
        action.choices = names[taken.pop()]
    elif action.metavar in _FILES:
        action.complete = "file"  # type: ignore[attr-defined]


def _names() -> dict[str, list[str]]:
    """Names that are known, by the arguments and options that take one."""
    found = index.read()
    recipes, models = ([row["name"] for row in found[kind]] for kind in ("recipes", "models"))
    data = [[row["name"], *row["aliases"]][-1] for row in found["data"]]
    mixers = [name for row in found["mixers"] for name in (row["name"], *row["aliases"])]
    return {
        **dict.fromkeys(("recipe", "--recipe"), recipes),
        **dict.fromkeys(("model", "models", "--model"), models),
        **dict.fromkeys(("data", "--data"), data),
        **dict.fromkeys(("--mixer", "--mixers", "--baseline"), mixers),
        "kind": [*KINDS],
    }
