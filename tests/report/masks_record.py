# SPDX-License-Identifier: Apache-2.0
"""A comparison's record of masks made up from random numbers, for tests of the report."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from synthetic import make_record

from keymix.analysis.mask_pictures import colours_of
from keymix.analysis.overlap import dice, jaccard, mean_jaccard
from keymix.compare.results import outcome
from keymix.compare.runs import Scores
from keymix.records import to_json
from keymix.report.part import packed_shares
from keymix.report.pictures import hex_colour, image_uri, layer_uri, outlines_uri
from keymix.task import get_task
from keymix.tasks.segmentation.answers import MaskAnswers
from keymix.tasks.segmentation.gallery import ERRORS, errors
from keymix.tasks.segmentation.page import by_size

LEVELS = {"softmax": 0.86, "key_value": 0.88, "key_value(pos_dim=50)": 0.87, "identity": 0.4}
ORGANS = ("large_bowel", "small_bowel", "stomach")
SIDE = 96
WHY = (
    *(f"{name}: mean IoU 9.0 %" for name in ("worst", "worst", "median", "best", "best")),
    "empty",
)


def ellipse(rng: np.random.Generator, shift: float = 0.0) -> np.ndarray:
    y, x = np.mgrid[:SIDE, :SIDE]
    cy, cx = rng.uniform(30, 66, 2)
    ry, rx = rng.uniform(6, 18, 2)
    return np.asarray(((y - cy) / ry) ** 2 + ((x - cx - shift) / rx) ** 2 < 1)


def made_up_gallery(labels: Sequence[str], names: Sequence[str], images: int) -> dict[str, Any]:
    paint = colours_of(len(names))
    classes = {name: hex_colour(colour) for name, colour in zip(names, paint, strict=True)}
    wrong = {name: hex_colour(colour) for name, colour in ERRORS.items()}
    scenes = []
    for i in range(6):
        area = i < 5
        rng = np.random.default_rng(i)
        picture = np.clip(rng.normal(90, 20, (1, SIDE, SIDE)), 0, 255).astype(np.uint8)
        seeds = [10 * i + c for c in range(len(names))]
        true = np.stack([ellipse(np.random.default_rng(seed)) & area for seed in seeds])
        lines, masks = outlines_uri(true, paint, true), layer_uri(true, paint, most=SIDE)
        layers = {"masks": masks, "outlines": lines, "errors": lines}
        panels: list[dict[str, Any]] = [{"text": "", "layers": layers}]
        for j, label in enumerate(labels):
            said = np.stack([ellipse(np.random.default_rng(s), 2.0 * j) & area for s in seeds])
            text = f"IoU {90 - j}.0\u00a0%" if area else "rightly nothing"
            layers = {
                "masks": layer_uri(said, paint, outlines=true, most=SIDE),
                "outlines": outlines_uri(said, paint, true),
                "errors": layer_uri(errors(said, true), [*ERRORS.values()], most=SIDE),
            }
            panels.append({"mixers": {label: ""}, "text": text, "layers": layers})
        scenes.append(
            {
                "id": f"case{7 * i}_day{20 + i}_slice_{60 + i:04d}",
                "why": WHY[i],
                "picture": image_uri(picture, most=SIDE),
                "size": [SIDE, SIDE],
                "panels": panels,
            }
        )
    return {
        "scenes": scenes,
        "about": {"seed": 0, "empty": True, "ignored": False},
        "legends": {"masks": classes, "outlines": classes, "errors": wrong},
        "missing": {},
        "names": [f"slice_{i:04d}" for i in range(images)],
    }


def make_mask_record(
    seeds: int = 3,
    *,
    levels: dict[str, float] | None = None,
    organs: Sequence[str] = ORGANS,
    images: int = 120,
    cases: int = 24,
) -> dict[str, Any]:
    """Make a record of made-up masks; class 0 is the background."""
    levels = levels or LEVELS
    rng = np.random.default_rng(3)
    labels, scored = list(levels), tuple(range(1, len(organs) + 1))
    record = make_record(seeds, accuracy=levels)
    group = np.arange(images) * cases // images
    true = rng.integers(0, 900, (images, len(organs) + 1)) * (rng.random((images, 1)) < 0.7)
    hard = rng.normal(0, 0.03, (cases, 1))[group]
    scores: dict[str, dict[int, Scores]] = {label: {} for label in labels}
    runs: dict[str, list[MaskAnswers]] = {label: [] for label in labels}
    for run in record["runs"]:
        part = np.clip(levels[run["mixer"]] + hard + rng.normal(0, 0.03, true.shape), 0, 1)
        shared = (true * part).astype(np.int64)
        said = shared + (true * rng.uniform(0, 0.05, true.shape)).astype(np.int64)
        counts = np.stack([shared, said, true], axis=-1)
        pooled = counts.sum(0)
        score = float(mean_jaccard(pooled, scored))
        test = {
            "jaccard": score,
            "weighted_jaccard": score - 0.01,
            "dice": float(dice(pooled)[1:].mean()),
            "loss": 0.1,
            "hd95_mm": 20.0 - 10 * score,
            "surface_dice": score / 2,
            "calibration_error": 0.125,
            "missed": 7,
        }
        val = {"jaccard": score + 0.01, "weighted_jaccard": score, "dice": score, "loss": 0.1}
        answers = MaskAnswers(
            index=np.arange(images),
            group=group,
            counts=counts,
            surfaces=np.full((*counts.shape[:2], 2), np.nan),
            bins=np.ones((images, 15, 3)),
            classes=("background", *organs),
            scored=scored,
        )
        runs[run["mixer"]].append(answers)
        scores[run["mixer"]][run["seed"]] = Scores(val=val["jaccard"], test=test, answers=answers)
        for key in ("correct", "class_correct"):
            del run[key]
        for entry in run["history"]:
            entry["val_jaccard"] = entry.pop("val_top1")
        run |= {
            "last": {"epoch": 12, "val": val, "test": test},
            "best": {"epoch": 10, "val": val, "test": test},
            "shares": packed_shares(mean_jaccard(counts, scored)),
            "reliability": [[100.0 * k, 100.0 * k * (k + 0.5) / 15, 50.0 * k] for k in range(15)],
            "classes": {
                "score": jaccard(pooled)[1:].tolist(),
                "dice": dice(pooled)[1:].tolist(),
                "hd95": [12.5 + c for c in scored],
                "surface_dice": [0.25 + c / 16 for c in scored],
                "missed": [2 * c for c in scored],
            },
        }
    task = get_task("segmentation")
    rows = outcome(labels, baseline=labels[0], scores=scores, task=task)
    as_json = to_json(rows)
    del record["confusions"]
    for image, slice_ in zip(record["attention"]["images"], range(4), strict=True):
        image["label"] = f"case{slice_}_day20_slice_0070"
    return record | {
        "outcome": {"last": as_json, "best": as_json},
        "test_images": images,
        "test_cases": cases,
        "classes": {"names": list(organs), "test_images": (true[:, 1:] > 0).sum(0).tolist()},
        "distance_unit": "mm",
        "sizes": to_json(by_size(runs)),
        "galleries": {"masks": made_up_gallery(labels, organs[:3], images)},
        "data": record["data"]
        | {
            "spec": "uwgi:uw-madison",
            "left_out": [],
            "left_out_count": 0,
            "task": "segmentation",
            "multilabel": False,
            "classes": ["background", *organs],
        },
    }


def shares(stored: str) -> np.ndarray:
    """Read a run's packed Jaccard indices of every image back."""
    return np.frombuffer(base64.b64decode(stored), "<u2") / 65535
