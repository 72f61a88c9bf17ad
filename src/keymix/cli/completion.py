# SPDX-License-Identifier: Apache-2.0
"""``keymix completion``: a script with which a shell completes verbs, options and names.

The script is made of the verbs' parsers by shtab and is complete in itself: no Python runs when a
person presses Tab.
"""

from __future__ import annotations

import argparse
import importlib
import re
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

_NAMES = {
    "recipes_file": ("recipe", "--recipe"),
    "models_file": ("model", "models", "--model"),
    "data_file": ("data", "--data"),
    "mixers": ("--mixer", "--mixers", "--baseline"),
    "kinds": ("kind",),
}
"""Kinds of names to the arguments and options that take one; a file may stand where _file says."""
_FILES = ("RUN", "DIR", "PATH", "FILE", "FILE.py", "IMAGE", "IMAGES")
"""What stands for a value that is a file or a folder."""

# before a name in a list may stand others, with {marks} between
_FUNCTIONS = {
    "bash": """\
_keymix_{kind}() {{
  local last="${{1##*[{marks}]}}"
  compgen -P "${{1%"$last"}}" -W '{names}' -- "$last"{files}
}}""",
    "zsh": """\
_keymix_{kind}() {{
  compset -P '*[{marks}]'
  compadd -- {names}{files}
}}""",
    "fish": """\
function _keymix_{kind}
  set -l before (string match -r '.*[{marks}]' -- (commandline -ct))
  printf "$before%s\\n" {names}{files}
end""",
}
_FILES_TOO = {
    "bash": '\n  compgen -f -- "$1"',
    "zsh": "\n  _files",
    "fish": "\n  __fish_complete_path (commandline -ct)",
}


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(prog="keymix completion", description=_DESCRIPTION, epilog=_EXAMPLES)
    made.add_argument("shell", choices=[*_FUNCTIONS], help="bash, zsh or fish")
    return made


def main(argv: list[str]) -> int:
    """Run ``keymix completion``."""
    shell: str = parser().parse_args(argv).shell
    import shtab

    script = shtab.complete(_whole(), shell, preamble={shell: _functions(shell)})
    console.say(_for_zsh(script) if shell == "zsh" else script)
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
    verbs, within = top.add_subparsers(), dict[str, Any]()
    for words, made in all_parsers().items():
        verb, _, name = words.partition(" ")
        place, about = verbs, VERBS[verb]
        if name:
            if verb not in within:
                within[verb] = verbs.add_parser(verb, help=about).add_subparsers()
            place, about = within[verb], _begins(made.description or name)
        shown = place.add_parser(name or verb, parents=[made], add_help=False, help=about)
        for action in shown._actions:
            _complete(action)
    return top


def _begins(description: str) -> str:
    """Return how a description begins, as far as one line of a list has room for it."""
    return " ".join(re.split(r"[.:,(]", description)[0].split())


def _for_zsh(script: str) -> str:
    """Let zsh complete each of several arguments, and the value in ``--option=value``."""
    script = script.replace('"(*):', '"*:')
    return re.sub(r'^(  "--[\w.-]+)(\[.*\]:)', r"\1=\2", script, flags=re.MULTILINE)


def _complete(action: argparse.Action) -> None:
    """Say how shtab completes the value of an option or argument."""
    if action.help == argparse.SUPPRESS:
        action.help = str(action.metavar)
    for kind, takers in _NAMES.items():
        if {action.dest, *action.option_strings} & {*takers}:
            name = f"_keymix_{kind}"
            action.complete = {"bash": name, "zsh": name, "fish": f"({name})"}  # type: ignore[attr-defined]
            return
    if action.metavar in _FILES:
        action.complete = "file"  # type: ignore[attr-defined]


def _functions(shell: str) -> str:
    """Write the functions that complete names."""
    found = index.read()
    names = {
        "recipes_file": [row["name"] for row in found["recipes"]],
        "models_file": [row["name"] for row in found["models"]],
        "data_file": [[row["name"], *row["aliases"]][-1] for row in found["data"]],
        "mixers": [name for row in found["mixers"] for name in (row["name"], *row["aliases"])],
        "kinds": list(KINDS),
    }
    made = [
        _FUNCTIONS[shell].format(
            kind=kind,
            names=" ".join(known),
            marks=",/" if kind == "mixers" else ",",
            files=_FILES_TOO[shell] if kind.endswith("_file") else "",
        )
        for kind, known in names.items()
    ]
    return "\n".join(made)
