# SPDX-License-Identifier: Apache-2.0
"""``keymix predict`` with a run that was trained on masks: a folder of masks, and its contents."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from keymix.cli import console
from keymix.errors import UserError
from keymix.report import csv_cells

if TYPE_CHECKING:
    from keymix.tasks.segmentation.mask_files import MaskPrediction
    from keymix.train.runs import Run

FOLDER = "predictions"


def predict(run: Run, given: argparse.Namespace, size: tuple[int, int] | None) -> int:
    """Predict masks of files, or of a split of data.

    Args:
        run: A run on masks.
        given: The words of the command line.
        size: Height and width of the images that the model is shown; None for those of training.

    Returns:
        0, or 2 if an image was broken.

    Raises:
        UserError: If an option does not fit, or as `predict_masks.predict_masks`.
    """
    for option, value in (("--top", given.top), ("--time-steps", given.time_steps)):
        if value is not None:
            raise UserError(
                f"{option} {value} is not for the run {str(run.folder)!r}, which predicts masks. "
                "Leave it out."
            )

    from keymix.tasks.segmentation.predict_masks import predict_masks

    out = Path(given.out or FOLDER)
    answers = predict_masks(
        run,
        given.images,
        out=out,
        data=given.data,
        split=given.split,
        which=given.weights,
        image_size=size,
        resize=given.resize,
        overwrite=given.overwrite,
    )
    good = [answer for answer in answers if answer.error is None]
    if given.format == "json":
        console.say(json.dumps([asdict(answer) for answer in answers], indent=2))
    elif given.format == "csv":
        rows = _rows(good)
        console.say(csv_cells.write(["id", "class", "pixels", "area_mm2"], rows).rstrip("\n"))
    elif good:
        _table(good)
    console.note(
        f"masks of {len(good)} images, overlays and predictions.csv with run lengths: {out}"
    )
    return console.tell_broken(answer.error for answer in answers if answer.error is not None)


def _rows(answers: Sequence[MaskPrediction]) -> list[list[str | int | float | None]]:
    """List pixels and area of each class of each image."""
    return [
        [answer.id, name, number, None if answer.area is None else round(answer.area[name], 2)]
        for answer in answers
        for name, number in (answer.pixels or {}).items()
    ]


def _table(answers: Sequence[MaskPrediction]) -> None:
    heads, rows = ["image", "class", "pixels", "area mm2"], []
    for *told, area in _rows(answers):
        rows.append([*map(str, told), "–" if area is None else f"{area:.1f}"])
    if all(answer.area is None for answer in answers):
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    console.table(heads, rows, left=2)
