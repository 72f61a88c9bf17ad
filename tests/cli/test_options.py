# SPDX-License-Identifier: Apache-2.0
"""Options that several verbs have are named, explained and meant alike; helps fit two screens."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from keymix import recipes
from keymix.cli import VERBS, main
from keymix.cli.completion import all_parsers
from keymix.cli.console import OUT_RULE, RESUME_RULE
from keymix.cli.recipe_options import COMMON, SHORT
from keymix.train.recipe import paths

PARSERS = all_parsers()
WITHOUT_RESULT = {"completion"}
ONE_MIXER = {"train", "swap", "check-mixer"}
RESUMING = {"train", "compare", "swap"}
SIZED = {"train", "compare", "eval", "predict", "swap", "count"}
OWN_MEANING = {
    "--format": "that of predictions, of an exported file, or of shards",
    "--heads": "a number of heads, or which of them are drawn",
    "--images": "files to look at, how many calibrate, or whether there are pictures",
    "--tokens": "sizes that are measured, or the stretch that is drawn",
    "--weights": "the epoch of a run, or a file",
}
"""Options that differ in form between verbs, and how."""


def options(verb: str) -> dict[str, argparse.Action]:
    return dict(PARSERS[verb]._option_string_actions)


def verbs_with(option: str) -> set[str]:
    return {verb for verb in PARSERS if option in options(verb)}


def test_every_verb_has_a_parser() -> None:
    assert {words.split()[0] for words in PARSERS} == set(VERBS)


def test_json_is_an_option_of_every_verb_with_a_result() -> None:
    assert verbs_with("--json") == set(PARSERS) - WITHOUT_RESULT
    assert len({options(verb)["--json"].help for verb in verbs_with("--json")}) == 1


def test_one_mixer_is_mixer_and_several_are_mixers() -> None:
    assert verbs_with("--mixer") == ONE_MIXER
    assert not verbs_with("--mixer") & verbs_with("--mixers")
    assert {options(verb)["--mixers"].metavar for verb in verbs_with("--mixers")} == {"LIST"}
    named = {name for verb in PARSERS for name in options(verb) if "mixer" in name}
    assert named == {"--mixer", "--mixers", "--model.mixer"}


def test_an_image_size_is_given_in_one_way() -> None:
    assert verbs_with("--image-size") == SIZED
    assert {options(verb)["--image-size"].metavar for verb in SIZED} == {"S|H,W"}
    assert not any(verbs_with(other) for other in ("--img-size", "--size", "--resolution"))


@pytest.mark.parametrize("verb", sorted(verbs_with("--out")))
def test_out_has_one_rule(verb: str) -> None:
    out, overwrite = options(verb)["--out"], options(verb)["--overwrite"]
    rule = RESUME_RULE if verb in RESUMING else OUT_RULE
    assert f" there{rule}" in str(out.help)
    assert overwrite.nargs == 0
    assert overwrite.help == options("train")["--overwrite"].help


def test_overwrite_comes_with_out() -> None:
    assert verbs_with("--overwrite") == verbs_with("--out") | {"push"}  # a folder, --to


def test_a_name_means_the_same_everywhere() -> None:
    forms: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    for verb in PARSERS:
        for name, action in options(verb).items():
            number = action.nargs if action.nargs != argparse.OPTIONAL else None
            choices = tuple(action.choices or ())
            shown = None if name == "--out" or choices else action.metavar
            forms[name].add((number, shown, choices))
    assert {name for name, found in forms.items() if len(found) > 1} == set(OWN_MEANING)


@pytest.mark.parametrize("name", sorted(OWN_MEANING))
def test_what_differs_between_verbs_is_said_by_each(name: str) -> None:
    for verb in verbs_with(name):
        said = str(options(verb)[name].help).partition("(default")[0]
        assert name.removeprefix("--").rstrip("s") in said, verb


def test_names_are_words_with_hyphens() -> None:
    fields = {f"--{path}" for path in paths()}
    own = {name for verb in PARSERS for name in options(verb)} - fields - {"-h"}
    own = {name for name in own if not name.startswith("--model.options.")}  # keys of a field
    assert not [name for name in own if not re.fullmatch(r"--[a-z][a-z0-9]*(-[a-z]+)*", name)]


@pytest.fixture
def _at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("_at_80_columns")
@pytest.mark.parametrize(
    ("words", "most"),
    [(["train", name], 48) for name in ("", *recipes.names())] + [(["compare"], 60)],
)
def test_help_fits_two_screens(
    words: list[str], most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*filter(None, words), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= most
    assert max(map(len, lines)) <= 80
    assert main([*filter(None, words), "--help-all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 2 * len(lines)


def test_common_fields_are_fields_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(COMMON) <= set(paths())
    assert 15 <= len(COMMON) <= 25
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    shorts = {path: name for name, path in SHORT.items()}
    for path in set(COMMON) - {"data.skip_corrupt"}:
        assert f"  {shorts.get(path, f'--{path}')} " in text


@pytest.mark.parametrize(("text", "size"), [("12", 12), ("12,16", [12, 16]), ("12x16", [12, 16])])
def test_the_image_size_of_training_is_read_as_everywhere(
    text: str, size: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "digits_vit", "--image-size", text, "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["image_size"] == size


@pytest.mark.parametrize(
    "command",
    [
        "train digits_vit",
        "compare --mixers mhsa,ska",
        "analyze memory --sides 2",
        "analyze complexity --tokens none --mixers ska",
    ],
)
def test_other_things_are_never_overwritten(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").mkdir()
    mine = tmp_path / "notes" / "mine.txt"
    mine.write_text("mine")
    for place in (tmp_path / "notes", mine):
        assert main([*command.split(), "--out", str(place), "--overwrite"]) == 2
        assert str(place) in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["notes", "mine.txt"]
    assert mine.read_text() == "mine"
