# SPDX-License-Identifier: Apache-2.0
"""Made sets of images with instances in the format of COCO."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CATEGORIES = [{"id": 7, "name": "cat"}, {"id": 3, "name": "ant"}, {"id": 90, "name": "dog"}]
"""In another order than that of their ids, which have gaps."""
SIZES = ((40, 60), (60, 40), (48, 48))  # height and width, by turns


def rectangle(
    key: int, image: int, box: tuple[float, float, float, float], category: int = 3
) -> dict[str, Any]:
    """An annotation whose polygon is its box."""
    x, y, w, h = box
    points = [x, y, x + w, y, x + w, y + h, x, y + h]
    return {
        "id": key,
        "image_id": image,
        "category_id": category,
        "bbox": [*box],
        "area": w * h,
        "iscrowd": 0,
        "segmentation": [points],
    }


def region(key: int, image: int, size: tuple[int, int], *, crowd: bool = True) -> dict[str, Any]:
    """An annotation of run lengths: the left quarter of the image."""
    height, width = size
    inside = height * (width // 4)
    return {
        "id": key,
        "image_id": image,
        "category_id": 90,
        "bbox": [0, 0, width // 4, height],
        "area": inside,
        "iscrowd": int(crowd),
        "segmentation": {"size": [height, width], "counts": [0, inside, height * width - inside]},
    }


def content(images: int, first: int = 1) -> dict[str, Any]:
    """What an annotation file says of some images: the last one has no instances."""
    entries, annotations = [], []
    for n in range(images):
        key, (height, width) = first + n, SIZES[n % 3]
        entries.append({"id": key, "file_name": f"{key:04d}.png", "height": height, "width": width})
        if n == images - 1:
            break
        annotations += [
            rectangle(100 * key, key, (4 + n, 6, 12.5, 20.25), CATEGORIES[n % 3]["id"]),
            rectangle(100 * key + 1, key, (20, 2 + n, 15, 9), 7),
        ]
        if n % 2:
            annotations.append(region(100 * key + 2, key, (height, width)))
    return {"images": entries, "annotations": annotations, "categories": deepcopy(CATEGORIES)}


def write(
    root: Path,
    numbers: dict[str, int] | None = None,
    *,
    change: Callable[[dict[str, Any]], object] | None = None,
    changed: str = "train2017",
) -> Path:
    """Write a set in ``train2017/`` and ``val2017/``.

    Args:
        root: Where to.
        numbers: Images of each split; 8 of train and 3 of val by default.
        change: What to change of annotations after the images are written.
        changed: The split whose annotations these are.
    """
    first = 1
    for name, count in (numbers or {"train2017": 8, "val2017": 3}).items():
        found = content(count, first)
        first += count
        (root / name).mkdir(parents=True)
        (root / "annotations").mkdir(exist_ok=True)
        for entry in found["images"]:
            shape = (entry["height"], entry["width"], 3)
            random = np.random.default_rng(entry["id"])
            pixels = random.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / entry["file_name"])
        if change is not None and name == changed:
            change(found)
        text = json.dumps(found)
        (root / "annotations" / f"instances_{name}.json").write_text(text)
    return root
