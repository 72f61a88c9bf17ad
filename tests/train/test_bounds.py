# SPDX-License-Identifier: Apache-2.0
"""Every number of a recipe has a stated range: none takes what makes no sense without a word."""

from __future__ import annotations

import math
import os
import typing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keymix import recipes
from keymix.data.bounds import BOUNDS
from keymix.data.dataset import ImageData
from keymix.errors import KeymixWarning, UserError
from keymix.train.config import leaves
from keymix.train.engine import train
from keymix.train.model import load_data
from keymix.train.recipe import Recipe, from_dict, replace_path
from keymix.train.validate import check_processes, check_recipe, training_batches

Vary = Callable[[dict[str, Any]], Recipe]
ABSURD = (math.nan, math.inf, -math.inf, -1e30, 1e30, 10**400, True, "much", [1, 2, 3])
NEEDS: dict[str, dict[str, Any]] = {  # what a number is refused without
    "loss.mixup_prob": {"loss.mixup": 0.2},
    "loss.mixup_off_epoch": {"loss.mixup": 0.2},
    "loss.similarity_blocks": {"loss.similarity": 0.5},
    "schedule.milestones": {"schedule.name": "multistep", "schedule.milestones": (1, 2)},
    "loss.distill_temperature": {"loss.distill": 0.5, "loss.distill_teacher": "run"},
}


def numbers() -> list[str]:
    """The fields of a recipe that take numbers, by dotted key."""

    def holds(hint: Any) -> bool:
        return hint in (int, float) or any(map(holds, typing.get_args(hint)))

    open_ones = ("model.options",)  # a model checks its own
    return [path for path, hint in leaves(Recipe) if holds(hint) and path not in open_ones]


def direct(recipe: Recipe, path: str, value: object) -> Recipe:
    """The recipe with a field replaced where it is, past what reads files and options."""
    group, _, name = path.rpartition(".")
    if not group:
        return replace(recipe, **{name: value})  # type: ignore[arg-type]
    return replace(recipe, **{group: replace(getattr(recipe, group), **{name: value})})


def test_every_number_has_a_bound_and_every_bound_a_number() -> None:
    assert sorted(BOUNDS) == sorted(numbers())


@pytest.mark.parametrize("path", sorted(BOUNDS))
def test_no_number_takes_what_makes_no_sense(path: str, vary: Vary) -> None:
    recipe, several = vary(NEEDS.get(path, {})), isinstance(BOUNDS[path], tuple)
    for value in ABSURD:
        given = [value, value] if several and not isinstance(value, list) else value
        with pytest.raises(UserError, match=rf"^{path} = "):
            replace_path(recipe, {path: given})
        with pytest.raises(UserError, match=rf"^{path} = "):
            direct(recipe, path, given)


def test_recipes_that_ship_are_within_bounds() -> None:
    for name in recipes.names():
        recipe = recipes.get(name)
        assert from_dict(recipe.to_dict()) == recipe


def test_equal_numbers_are_equal_records(tiny: Recipe) -> None:
    for typed in (
        replace_path(tiny, {"data.batch_size": "16", "optim.weight_decay": "-0.0"}),
        direct(direct(tiny, "data.batch_size", 16.0), "optim.weight_decay", -0.0),
    ):
        assert type(typed.data.batch_size) is int
        assert str(typed.optim.weight_decay) == "0.0"


@pytest.mark.parametrize("seed", [0, 2**32, 2**63, 2**64 - 1])
def test_every_seed_within_bounds_trains(seed: int, vary: Vary, tmp_path: Path) -> None:
    recipe = vary({"seed": seed, "data.split_seed": seed, "schedule.epochs": 1})
    assert train(recipe, tmp_path / "run").summary.seed == seed


@pytest.mark.parametrize(
    ("changed", "culprit"),
    [
        ({"schedule.min_lr": 0.5}, "schedule.min_lr"),
        ({"schedule.warmup_lr": 0.5}, "schedule.warmup_lr"),
        ({"data.workers": 1000}, "data.workers"),
    ],
)
def test_what_contradicts_the_rest_or_the_machine_is_refused(
    changed: dict[str, Any], culprit: str, vary: Vary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    with pytest.raises(UserError, match=rf"^{culprit} = "):
        check_recipe(vary(changed))
    check_recipe(vary({"schedule.warmup_epochs": 0, "schedule.warmup_lr": 0.5}))  # never read
    check_processes("data.workers", 32)


@pytest.fixture(scope="module")
def digits(tiny_recipe: Recipe) -> ImageData:
    """The 72 training images of 12 x 12 pixels that the tiny recipe has."""
    return load_data(tiny_recipe.data)


def test_a_batch_of_all_images_is_reported(vary: Vary, digits: ImageData) -> None:
    with pytest.warns(KeymixWarning, match=r"^data\.batch_size = 73: there are 72 training images"):
        training_batches(vary({"data.batch_size": 73}), digits)


def test_a_last_batch_of_one_image_gets_another(vary: Vary, digits: ImageData) -> None:
    for size, served in ((71, [71, 2]), (35, [35, 35, 2]), (1, [1] * 72), (72, [72])):
        batches = [*training_batches(vary({"data.batch_size": size}), digits)]
        assert [len(each.index) for each in batches] == served
        assert {i for each in batches for i in each.index.tolist()} == {*range(72)}
