# SPDX-License-Identifier: Apache-2.0
"""Commands in the documents exist: verbs, options, mixers, models and recipes."""

from __future__ import annotations

import itertools
import re
from functools import cache

from documents import DOCUMENTS, ROOT, commands

from each import each
from keymix.cli import VERBS
from keymix.cli.completion import all_parsers
from keymix.cli.console import VerbParser

COMMANDS = {
    f"{where} keymix {' '.join(words)}": (words,)
    for path in DOCUMENTS
    for where, words in commands(path)
}


@cache
def parsers() -> dict[str, VerbParser]:
    return all_parsers()


def options_of(words: list[str]) -> set[str]:
    """The options of a command, read from its parser, or from those of all of its sub-verbs."""
    verb = words[0]
    own = [name for name in parsers() if name in (verb, " ".join(words[:2]))]
    named = own or [name for name in parsers() if name.startswith(f"{verb} ")]
    return {option for name in named for which in parsers()[name].own_options() for option in which}


@each("words", COMMANDS)
def test_documented_command_parses(words: list[str]) -> None:
    verb, *rest = words
    if verb.startswith("-") or verb == "VERB":
        return
    assert verb in VERBS
    options = options_of(words)
    for word in rest:
        name = word.partition("=")[0]
        if name.startswith("--") and not name.startswith(("--model.options.", "--task.options.")):
            assert name in options, f"keymix {verb} has no option {name}"


@each("words", COMMANDS)
def test_documented_mixers_models_and_recipes_exist(words: list[str]) -> None:
    import timm

    from keymix import list_models, recipes
    from keymix.mixers.spec import parse_mixers

    verb, *rest = words
    values = dict(itertools.pairwise(rest))
    mixers = values.get("--mixers", values.get("--mixer"))
    if mixers is not None and "--import" not in rest and not mixers.isupper():
        assert parse_mixers(mixers)
    model = values.get("--model", rest[0] if verb == "count" and rest else None)
    if model is not None and not model.isupper():
        assert model in list_models() or timm.is_model(model)
    if verb == "train" and rest and rest[0].endswith("_vit"):
        assert rest[0] in recipes.names()


def test_the_documents_have_commands() -> None:
    assert len(COMMANDS) > 20


def test_a_made_up_option_is_noticed() -> None:
    assert "--frobnicate" not in options_of(["count"])


def test_the_readme_marks_its_test_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    marked = re.findall(r"^<!-- test-command -->\n+```\w*\n(.+?)\n```$", text, re.MULTILINE)
    assert len(marked) == 1
    assert "pytest" in marked[0]
