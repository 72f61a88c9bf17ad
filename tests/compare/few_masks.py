# SPDX-License-Identifier: Apache-2.0
"""A comparison of seconds on masks: forty small pictures of discs and bars, ten cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from keymix.compare.run import Comparison, compare
from keymix.data.augment import Augment
from keymix.train.recipe import DataConfig, ModelConfig, Recipe, ScheduleConfig

CASES, SLICES, SIDE = 10, 4, 24


def made_masks(folder: Path) -> Path:
    """Write images with a bright disc (1) and a grey bar (2); the first of a case has none.

    Two columns at the right of every mask are ignored.
    """
    rng = np.random.default_rng(0)
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    (folder / "classes.txt").write_text("background\ndisc\nbar\n", encoding="utf-8")
    groups = ["image,group"]
    y, x = np.mgrid[:SIDE, :SIDE]
    for case in range(CASES):
        for slice_ in range(SLICES):
            name = f"case{case}_slice_{slice_:02d}"
            mask = np.zeros((SIDE, SIDE), dtype=np.uint8)
            if slice_:
                row, column = rng.integers(6, SIDE - 6, 2)
                top = int(rng.integers(0, SIDE - 4))
                mask[top : top + 4] = 2
                mask[(y - row) ** 2 + (x - column) ** 2 < (2 + slice_) ** 2] = 1
            pixels = np.array([40, 220, 130])[mask] + rng.normal(0, 8, mask.shape)
            mask[:, -2:] = 255
            image = np.clip(pixels, 0, 255).astype(np.uint8)
            Image.fromarray(image).save(folder / "images" / f"{name}.png")
            Image.fromarray(mask).save(folder / "masks" / f"{name}.png")
            groups.append(f"{name}.png,case{case}")
    (folder / "groups.csv").write_text("\n".join(groups) + "\n", encoding="utf-8")
    return folder


def recipe_of(folder: Path, **model: Any) -> Recipe:
    """Return a recipe of two epochs for what `made_masks` wrote."""
    options = {"depth": 2, "embed_dim": 24, "decoder_widths": (16, 8, 8)}
    return Recipe(
        name="few_masks",
        data=DataConfig(
            spec=f"masks:{folder}",
            image_size=SIDE,
            batch_size=8,
            val_fraction=1 / 6,
            test_fraction=0.4,
        ),
        augment=Augment(flip=True, vertical_flip=True),
        model=ModelConfig(**({"name": "setr_micro", "options": options} | model)),
        schedule=ScheduleConfig(epochs=2, warmup_epochs=1),
    )


def few(folder: Path, out: Path, **more: Any) -> Comparison:
    settings: dict[str, Any] = {
        "recipe": recipe_of(folder),
        "mixers": "mhsa,kv(pos_dim=5)",
        "seeds": 2,
        "processes": 1,
        "reference": False,
        "out": out,
    }
    return compare(**(settings | more))
