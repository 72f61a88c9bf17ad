# SPDX-License-Identifier: Apache-2.0
"""Does a detector learn eight photographs by heart? Then loss, targets and evaluator fit together.

    python benchmarks/overfit_detection.py PATH --out overfit
    python benchmarks/overfit_detection.py PATH --model cascade_mask_rcnn --epochs 130 --out cascade

PATH has images in COCO's layout. The first nine training images with instances are taken, in the
file's order. Validation is one of them, chosen by hash as always; the other eight train, and the
same eight are the test split. The recipe is ``mask_rcnn_small`` with a CSKAFormer-S18 of random
weights as backbone, without flips. Folder and run are written into ``--out``; the scores are those
of the run's last weights on the eight images.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keymix
from keymix.data import load
from keymix.errors import UserError
from keymix.recipes import get
from keymix.tasks.detection.facts import TASK
from keymix.train.recipe import replace_path
from measured import begin, options, table

IMAGES = 8
SHARE = 0.02  # of nine images, for validation: one
FILE = "annotations/instances_{}2017.json"


def chosen(source: Path, folder: Path) -> None:
    """Write the images to a folder: all nine as train, and those that train as val2017 too."""
    whole: dict[str, Any] = json.loads((source / FILE.format("train")).read_text("utf-8"))
    with_instances = {each["image_id"] for each in whole["annotations"]}
    images = [each for each in whole["images"] if each["id"] in with_instances][: IMAGES + 1]
    if len(images) <= IMAGES:
        raise UserError(f"{source}: {len(images)} images with instances, and nine are needed")
    own = _of(whole, images)
    used = {each["category_id"] for each in own["annotations"]}
    own["categories"] = [each for each in whole["categories"] if each["id"] in used]
    for split in ("train", "val"):
        _write(own, source, folder, split)
    train = load(f"coco:{folder}", val_fraction=SHARE).train
    names = {Path(train.ids(i)).name for i in range(len(train))}
    shutil.rmtree(folder / "val2017")
    _write(_of(own, [each for each in images if each["file_name"] in names]), source, folder, "val")


def _of(whole: dict[str, Any], images: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ids = {each["id"] for each in images}
    annotations = [each for each in whole["annotations"] if each["image_id"] in ids]
    return {**whole, "images": [*images], "annotations": annotations}


def _write(table: dict[str, Any], source: Path, folder: Path, split: str) -> None:
    file = folder / FILE.format(split)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(table), "utf-8")
    (folder / f"{split}2017").mkdir()
    for each in table["images"]:
        shutil.copy(source / "train2017" / each["file_name"], folder / f"{split}2017")


def main(argv: Sequence[str] | None = None) -> int:
    """Train and print the scores."""
    parser = options(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", choices=("mask_rcnn", "cascade_mask_rcnn"), default="mask_rcnn")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--out", type=Path, required=True)
    given = begin(parser, argv)
    given.out.mkdir(parents=True)
    chosen(given.data, given.out / "data")
    changed = {
        "data.spec": f"coco:{given.out / 'data'}",
        "data.image_size": (256, 384),
        "data.val_fraction": SHARE,
        "augment.flip": False,
        "model.name": given.model,
        "model.options.backbone": "cskaformer_s18",
        "model.options.backbone_size": 224,
        "model.options.out_channels": 128,
        "model.options.samples": 64,
        "schedule.epochs": given.epochs,
    }
    run = keymix.train(replace_path(get("mask_rcnn_small"), changed), given.out / "run")
    scores = {each.name: run.summary.last.test.scores[each.key] for each in TASK.scores}
    cells = ["–" if score is None else f"{100 * score:.1f}" for score in scores.values()]
    table([f"{name}, %" for name in scores], [cells], names=0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
