# SPDX-License-Identifier: Apache-2.0
"""What a run refuses before it begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keymix.errors import UserError
from keymix.train.engine import train
from keymix.train.recipe import Recipe

Vary = Callable[[dict[str, Any]], Recipe]
CLASS_TOKEN = {"model.options.class_token": True, "model.global_pool": "token"}


@pytest.mark.parametrize("mixer", ["identity", "pooling", "sep_conv"])
def test_a_class_token_that_hears_nothing_is_refused(
    vary: Vary, tmp_path: Path, mixer: str
) -> None:
    recipe = vary({**CLASS_TOKEN, "model.mixer": mixer})
    with pytest.raises(UserError, match=rf"{mixer}.*--model\.global_pool avg"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_one_block_that_serves_the_class_token_is_enough(vary: Vary, tmp_path: Path) -> None:
    recipe = vary({**CLASS_TOKEN, "model.options.depth": 2, "model.mixer": "identity/softmax"})
    assert train(recipe, tmp_path / "run").summary["last"]["test"]["top1"] > 0


@pytest.mark.parametrize(
    ("option", "says"),
    [("img_size", "data.image_size"), ("num_classes", "leave it out"), ("in_chans", "leave it")],
)
def test_what_the_data_says_is_no_option_of_the_model(
    vary: Vary, tmp_path: Path, option: str, says: str
) -> None:
    recipe = vary({f"model.options.{option}": 24})
    with pytest.raises(UserError, match=rf"model\.options\.{option}.*{says}"):
        train(recipe, tmp_path / "run")
