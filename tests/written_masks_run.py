# SPDX-License-Identifier: Apache-2.0
"""A run on masks without the training: weights by chance, whose masks have several classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from keymix.train import files
from keymix.train.model import build_model, load_data
from keymix.train.recipe import DataConfig, ModelConfig, Recipe, TaskConfig
from keymix.train.record import WeightsFacts
from keymix.train.runs import Run, load_run


def written_masks_run(
    folder: Path, spec: str, *, image_size: int = 24, masks: str | None = None, **data: Any
) -> Run:
    """Write a run's folder as training leaves it before it has learned anything.

    Args:
        folder: Where; it is made.
        spec: The data.
        image_size: Pixels a side of the images that the model sees.
        masks: Which masks the data are read as.
        data: Other fields of the recipe's data.
    """
    recipe = Recipe(
        name="masks",
        data=DataConfig(spec=spec, image_size=image_size, val_fraction=0.2, **data),
        task=TaskConfig(options={"masks": masks}),
        model=ModelConfig(
            name="setr_micro", options={"depth": 2, "embed_dim": 24, "decoder_widths": (16, 8, 8)}
        ),
    )
    images = load_data(recipe.data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model(
            recipe,
            num_classes=len(images.classes),
            in_chans=images.in_chans,
            image_size=images.image_size,
        )
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.5)
    facts = WeightsFacts(recipe=recipe, data=images.record())
    files.make_folder(folder)
    files.write_json(folder / files.RECIPE, recipe.to_dict())
    files.write_weights(folder / files.weights_file("last"), model.state_dict(), facts)
    return load_run(folder)
