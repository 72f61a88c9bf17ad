# SPDX-License-Identifier: Apache-2.0
"""A small set in the format of COCO, of bright rectangles that a detector can learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CATEGORIES = [{"id": 5, "name": "bar"}, {"id": 2, "name": "block"}, {"id": 9, "name": "never"}]
"""With gaps between the ids, and a class that no image has."""
COLOURS = {5: (240, 60, 40), 2: (40, 90, 240)}


def write_instances(root: Path, *, train: int = 8, val: int = 4) -> Path:
    """Write images of 64 to 96 pixels, red bars and blue blocks, the last of each split empty.

    The first image of each has a crowd.
    """
    random = np.random.default_rng(0)
    first = 1
    (root / "annotations").mkdir(parents=True)
    for name, number in (("train2017", train), ("val2017", val)):
        (root / name).mkdir()
        images, annotations = [], list[dict[str, Any]]()
        for key in range(first, first + number):
            height, width = (int(side) for side in random.integers(64, 97, 2))
            pixels = random.integers(0, 50, (height, width, 3)).astype(np.uint8)
            entry = {"id": key, "file_name": f"{key:06d}.png", "height": height, "width": width}
            images.append(entry)
            some = 0 if key == first + number - 1 else int(random.integers(1, 4))
            for n in range(some):
                category = 5 if n % 2 else 2
                w, h = (40, 12) if category == 5 else (22, 22)
                x, y = (int(random.integers(0, most)) for most in (width - w, height - h))
                pixels[y : y + h, x : x + w] = COLOURS[category]
                annotations.append(_annotation(len(annotations), key, category, (x, y, w, h)))
            if key == first:
                annotations.append(_crowd(len(annotations), key, (height, width)))
            Image.fromarray(pixels).save(root / name / entry["file_name"])
        first += number
        found = {"images": images, "annotations": annotations, "categories": CATEGORIES}
        text = json.dumps(found)
        (root / "annotations" / f"instances_{name}.json").write_text(text, encoding="utf-8")
    return root


def _annotation(
    number: int, image: int, category: int, box: tuple[int, int, int, int]
) -> dict[str, Any]:
    x, y, w, h = box
    return {
        "id": 1000 * image + number,
        "image_id": image,
        "category_id": category,
        "bbox": [*box],
        "area": w * h,
        "iscrowd": 0,
        "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
    }


def _crowd(number: int, image: int, size: tuple[int, int]) -> dict[str, Any]:
    """Mark the left six columns as a crowd of bars."""
    height, width = size
    inside = 6 * height
    return {
        "id": 1000 * image + number,
        "image_id": image,
        "category_id": 5,
        "bbox": [0, 0, 6, height],
        "area": inside,
        "iscrowd": 1,
        "segmentation": {"size": [height, width], "counts": [0, inside, height * width - inside]},
    }
