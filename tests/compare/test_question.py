# SPDX-License-Identifier: Apache-2.0
"""One definition of what a comparison is asked: of `compare`, of the command line, and stored."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from keymix.compare.question import Question
from keymix.compare.run import compare
from keymix.errors import UserError
from keymix.recipes import get
from keymix.records import from_json, to_json


def test_compare_takes_what_a_question_has() -> None:
    taken = {**inspect.signature(compare).parameters}
    assert taken.pop("progress").default is None
    assert [*taken] == [field.name for field in fields(Question)]
    for field in fields(Question):
        parameter = taken[field.name]
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert (parameter.annotation, parameter.default) == (field.type, field.default)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"mixers": ["mhsa", "ska"], "seeds": [0, 4], "minutes": 20, "images": False},
        {"recipe": get("digits_vit"), "overrides": {"optim.lr": 1e-3, "data.image_size": 12}},
    ],
)
def test_a_question_is_stored_and_read_again_but_for_its_place(asked: dict[str, Any]) -> None:
    question = Question(**asked, out=Path("somewhere"), overwrite=True)
    stored = to_json(question)
    assert not {"out", "overwrite"} & {*stored}
    again = from_json(Question, stored, where="it")
    assert to_json(again) == stored
    assert again.repeats(question)


@pytest.mark.parametrize(
    ("more", "same"),
    [
        ({"seeds": 5, "mixers": "mhsa", "controls": False, "margin": 1, "out": "x"}, True),
        ({"minutes": None}, True),
        ({"minutes": 20}, False),
        ({"epochs": 3}, False),
        ({"data": "svhn"}, False),
        ({"overrides": {"optim.lr": 1e-3}}, False),
        ({"match": "params"}, False),
        ({"tune": "lr"}, False),
    ],
)
def test_what_a_folder_has_answers_a_question_that_asks_the_same_of_all_runs(
    more: dict[str, Any], same: bool
) -> None:
    before = Question(data="digits", minutes=10)
    assert Question(**({"data": "digits", "minutes": 10} | more)).repeats(before) is same


def test_the_call_is_the_command_where_none_is_given() -> None:
    assert Question(seeds=2, out=Path("o")).command == "keymix.compare(seeds=2, out='o')"
    assert Question(command="keymix compare").command == "keymix compare"
    recipe = Question(recipe=get("digits_vit"), imports=["mine.py"]).command
    assert recipe == "keymix.compare(recipe='digits_vit', imports=['mine.py'])"


def test_what_can_only_be_one_thing_is_refused_at_once() -> None:
    with pytest.raises(UserError, match="unknown match 'macs'"):
        Question(match="macs")  # type: ignore[arg-type]
