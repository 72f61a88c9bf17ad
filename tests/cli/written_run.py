# SPDX-License-Identifier: Apache-2.0
"""A run's folder without the training: recipe and weights as a run leaves them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from keymix.recipes.small import digits_vit
from keymix.train import files
from keymix.train.model import build_model, load_data
from keymix.train.record import WeightsFacts


def written_run(folder: Path, *, mixer: str = "mhsa", depth: int = 2, **model: Any) -> Path:
    """Write a run of few digits with the weights that training starts from.

    Args:
        folder: Where; it is made.
        mixer: Of all blocks.
        depth: Blocks.
        model: Fields of the recipe's model in place of its own, ``options`` in place of depth.
    """
    one = digits_vit()
    one = replace(
        one,
        data=replace(one.data, limit=40),
        model=replace(one.model, **{"mixer": mixer, "options": {"depth": depth}, **model}),
    )
    images = load_data(one.data)
    model = build_model(one, num_classes=10, in_chans=images.in_chans, image_size=images.image_size)
    facts = WeightsFacts(recipe=one, data=images.record())
    files.make_folder(folder)
    files.write_json(folder / files.RECIPE, one.to_dict())
    files.write_weights(folder / files.weights_file("last"), model.state_dict(), facts)
    return folder
