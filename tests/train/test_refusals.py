# SPDX-License-Identifier: Apache-2.0
"""What a run refuses before it begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from keymix.errors import UserError
from keymix.train.engine import train
from keymix.train.model import enough_memory, load_data
from keymix.train.recipe import Recipe, replace_path

Vary = Callable[[dict[str, Any]], Recipe]
CLASS_TOKEN = {"model.options.class_token": True, "model.global_pool": "token"}


@pytest.mark.parametrize("mixer", ["identity", "pooling", "sep_conv"])
def test_a_class_token_that_reads_nothing_is_refused(
    vary: Vary, tmp_path: Path, mixer: str
) -> None:
    recipe = vary({**CLASS_TOKEN, "model.mixer": mixer})
    with pytest.raises(UserError, match=rf"{mixer}.*--model\.global_pool avg"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_one_block_that_serves_the_class_token_is_enough(vary: Vary, tmp_path: Path) -> None:
    recipe = vary({**CLASS_TOKEN, "model.options.depth": 2, "model.mixer": "identity/softmax"})
    assert train(recipe, tmp_path / "run").summary.last.test.scores["top1"] > 0


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


@pytest.mark.parametrize("image_size", [48, (32, 48)])
def test_running_out_of_memory_is_one_line_that_names_the_images(
    image_size: int | tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = r"^out of memory for images of (48x48|32x48) pixels: name a smaller image size\.$"
    with pytest.raises(UserError, match=line), enough_memory(image_size):
        torch.empty(1 << 50)  # on a CPU: a plain RuntimeError with the allocator's text
    refusal = UserError("model 'vit' cannot be built with img_size=48")
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to")):
        for cause in (None, error):  # as it comes, or as the cause of what a constructor tells
            with pytest.raises(UserError, match=line), enough_memory(image_size):
                raise refusal if cause else error from cause
    for other in (RuntimeError("shapes differ"), UserError("no such data")):
        with pytest.raises(type(other), match=str(other)), enough_memory(image_size):
            raise other
    monkeypatch.setattr("keymix.train.model.memory_of_this_machine", lambda: 4000.0)
    with pytest.raises(UserError, match=line), enough_memory(image_size):
        pytest.fail("an image that fits no memory was begun")


def test_images_beyond_memory_are_refused_by_every_way_to_use_them(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keymix.train.model.memory_of_this_machine", lambda: 1e6)
    huge = replace_path(tiny, {"data.image_size": [1000, 2000]})
    line = "out of memory for images of 1000x2000 pixels: name a smaller image size"
    with pytest.raises(UserError, match=rf"{line}, data.batch_size \(16\)"):
        train(huge, tmp_path / "run")
    with pytest.raises(UserError, match=line):
        load_data(huge.data)
