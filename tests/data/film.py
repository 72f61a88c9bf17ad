# SPDX-License-Identifier: Apache-2.0
"""Frames of made films: a view that goes over a landscape, now quickly, now slowly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

FRAMES = 32  # of each of the two films of `save_frames`


def film(count: int, seed: int, side: int = 48) -> list[NDArray[np.uint8]]:
    """Make frames, neighbours of which share most of what they show."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(1, 9, count)
    coarse = rng.integers(0, 256, (6, 4 + int(steps.sum()) // 8 + side // 8), dtype=np.uint8)
    land = Image.fromarray(coarse).resize((coarse.shape[1] * 8, side), Image.Resampling.BILINEAR)
    whole = np.asarray(land, dtype=float)
    starts = np.cumsum(steps) - steps[0]
    return [
        (whole[:, at : at + side] + rng.normal(0, 3, (side, side))).clip(0, 255).astype(np.uint8)
        for at in starts.tolist()
    ]


def save_frames(root: Path, *, kind: str) -> Path:
    """Write two films, as images with masks (``masks``) or in the folders of two classes."""
    for k, name in enumerate("ab"):
        for i, frame in enumerate(film(FRAMES, k)):
            image = root / ("images" if kind == "masks" else name) / f"{name}_{i:03d}.png"
            image.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(frame).save(image)
            if kind == "masks":
                (root / "masks").mkdir(exist_ok=True)
                Image.fromarray((frame > 128).astype(np.uint8)).save(root / "masks" / image.name)
    if kind == "masks":
        (root / "classes.txt").write_text("background\nbright\n")
    return root
