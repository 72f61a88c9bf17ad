# SPDX-License-Identifier: Apache-2.0
"""A small set in the layout of UW-Madison GI Tract, made of ellipses that a network can learn."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from keymix.data.segmentation.rle import encode
from PIL import Image

ORGANS = ("large_bowel", "small_bowel", "stomach")


def write_uwgi(folder: Path, *, cases: int = 6, slices: int = 3, side: int = 24) -> Path:
    """Write cases of one day each; the last slice of each has no organ, and organs overlap."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:side, :side] / side
    rows = []
    for case in range(1, cases + 1):
        scans = folder / "train" / f"case{case}" / f"case{case}_day1" / "scans"
        scans.mkdir(parents=True)
        for number in range(1, slices + 1):
            pixels = rng.normal(4000, 300, (side, side))
            for k, organ in enumerate(ORGANS):
                inside = np.zeros((side, side), dtype=bool)
                if number < slices:
                    cy, cx = rng.uniform(0.3, 0.7, 2)
                    inside = ((y - cy) / 0.2) ** 2 + ((x - cx) / 0.15) ** 2 < 1
                pixels[inside] = 6000 + 3000 * k
                rows.append((f"case{case}_day1_slice_{number:04d}", organ, encode(inside)))
            name = f"slice_{number:04d}_{side}_{side}_1.50_1.50.png"
            Image.fromarray(pixels.clip(0, 65535).astype(np.uint16)).save(scans / name)
    with (folder / "train.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("id", "class", "segmentation"), *rows])
    return folder
