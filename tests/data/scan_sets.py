# SPDX-License-Identifier: Apache-2.0
"""Small sets of slices and of image and mask files, in the layouts of hospitals and others."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ORGANS = ("large_bowel", "small_bowel", "stomach")
HEAD = ("id", "class", "segmentation")


def scan_path(root: Path, case: int, day: int, number: int, size: tuple[int, int]) -> Path:
    """The file of a slice of a height and width."""
    folder = root / "train" / f"case{case}" / f"case{case}_day{day}" / "scans"
    return folder / f"slice_{number:04d}_{size[1]}_{size[0]}_1.50_2.00.png"


def add_scan(
    root: Path, case: int, day: int, number: int, pixels: NDArray[np.uint16] | None = None
) -> Path:
    """Write a slice of 16 bits; random pixels of 6 rows and 9 columns unless they are given."""
    if pixels is None:
        seed = np.random.default_rng([case, day, number])
        pixels = seed.integers(100, 9000, (6, 9)).astype(np.uint16)
    path = scan_path(root, case, day, number, (pixels.shape[0], pixels.shape[1]))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def write_rows(path: Path, rows: Sequence[Sequence[str]], head: Sequence[str] = HEAD) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([head, *rows])


def lines_of(name: str, **runs: str) -> list[list[str]]:
    """The three rows of a slice."""
    return [[name, organ, runs.get(organ, "")] for organ in ORGANS]


def scan_set(root: Path, counts: Mapping[int, int], *, day: int = 0) -> Path:
    """Cases with so many slices, numbers from 1; slice n has stomach at 10 + n and 11 + n."""
    rows: list[list[str]] = []
    for case, count in counts.items():
        for number in range(1, count + 1):
            add_scan(root, case, day, number)
            rows += lines_of(f"case{case}_day{day}_slice_{number:04d}", stomach=f"{10 + number} 2")
    write_rows(root / "train.csv", rows)
    return root


def mask_set(root: Path, counts: Mapping[str, int], *, size: tuple[int, int] = (6, 9)) -> Path:
    """``{"": 8}`` or ``{"train": 8, "test": 2}`` grey images with masks of three classes."""
    root.mkdir(exist_ok=True)
    (root / "classes.txt").write_text("background\nleaf\nroot\n")
    for split, count in counts.items():
        for kind in ("images", "masks"):
            (root / split / kind).mkdir(parents=True)
        for k in range(count):
            random = np.random.default_rng([len(split), k])
            image = random.integers(0, 256, size, dtype=np.uint8)
            mask = random.choice(np.array([0, 1, 2, 255], dtype=np.uint8), size)
            Image.fromarray(image).save(root / split / "images" / f"p{k}.png")
            Image.fromarray(mask).save(root / split / "masks" / f"p{k}.png")
    return root
