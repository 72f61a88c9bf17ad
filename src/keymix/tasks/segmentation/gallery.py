# SPDX-License-Identifier: Apache-2.0
"""Masks in pictures: the worst, median and best test images, with the truth and every answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keymix.analysis.mask_pictures import PALETTE, colours_of
from keymix.analysis.overlap import mean_jaccard, overlap_counts
from keymix.data.kinds import IGNORE
from keymix.report.formats import percent
from keymix.report.gallery import Gallery, Panel, Scene
from keymix.report.part import ImageOutputs
from keymix.report.pictures import hex_colour, image_uri, layer_uri, outlines_uri

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.tasks.segmentation.answers import MaskAnswers

BoolArray = NDArray[np.bool_]

SIDE = 224
"""Most pixels per side of a picture."""
EACH = 2
"""Images of the worst, of the best and of the median ones."""
ERRORS = {
    "right": PALETTE[2],
    "found too much": PALETTE[5],
    "missed": PALETTE[1],
    "of another class": PALETTE[4],
}
"""What the map of errors shows, and its colours."""


def telling(runs: Sequence[MaskAnswers]) -> dict[int, str]:
    """Choose images by their IoU, the mean over runs: the worst, best and median, and an empty one.

    Two of each, of different cases where there are; of images where the truth has something.
    """
    first, share = runs[0], np.mean([run.images() for run in runs], axis=0)
    there = first.truth.any(axis=1)
    order = sorted(np.flatnonzero(there).tolist(), key=lambda i: share[i])
    outwards = sorted(range(len(order)), key=lambda k: abs(2 * k + 1 - len(order)))
    ranked = {"worst": order, "median": [order[k] for k in outwards], "best": order[::-1]}
    found: dict[str, list[int]] = {name: [] for name in ranked}
    for name in ("worst", "best", "median") * EACH:
        cases = {first.group[i] for i in found[name]}
        left = [i for i in ranked[name] if not any(i in taken for taken in found.values())]
        found[name] += sorted(left, key=lambda i: first.group[i] in cases)[:1]
    chosen = {
        i: f"{name}: mean IoU {percent(share[i])}\u00a0%" for name in ranked for i in found[name]
    }
    return chosen | dict.fromkeys(np.flatnonzero(~there)[:1].tolist(), "empty")


def draw(data: ImageData, given: ImageOutputs) -> Gallery:
    """Draw what each mixer's logits find on some test images, next to the truth."""
    from keymix.data.pixels import picture
    from keymix.tasks.segmentation.scoring import predicted_masks

    record, test = data.record(), data.test
    multilabel, scored = bool(record.multilabel), record.scored_classes
    paint = colours_of(len(scored))
    scenes, ignored = [], False
    for at, (i, why) in enumerate(given.chosen.items()):
        pixels = test.own(i) if test.listed else test.read(i)
        truth = (test.rows[i].read_target() if test.listed else test.mask(i)).numpy()
        step = -(-max(truth.shape[-2:]) // SIDE)  # larger ones lose rows and columns
        out = (truth == IGNORE).reshape(-1, *truth.shape[-2:]).any(0)[::step, ::step]
        true = _planes(truth, scored, multilabel=multilabel)[:, ::step, ::step]
        masks = layer_uri(true, paint, grey=out, most=SIDE)
        lines = outlines_uri(np.zeros_like(true), paint, true)
        layers = {"masks": masks, "outlines": lines, "errors": lines}
        panels = [Panel(text="", layers=layers)]
        for label, logits in given.outputs.items():
            found = predicted_masks(logits[at][None].float(), multilabel=multilabel)[0].numpy()
            counts = overlap_counts(
                found[None], truth[None], num_classes=len(data.classes), multilabel=multilabel
            )
            drawn = _planes(found, scored, multilabel=multilabel)[:, ::step, ::step]
            layers = {
                "masks": layer_uri(drawn, paint, outlines=true, most=SIDE),
                "outlines": outlines_uri(drawn, paint, true),
                "errors": layer_uri(errors(drawn & ~out, true), [*ERRORS.values()], most=SIDE),
            }
            panels.append(Panel(mixers={label: ""}, text=_quality(counts, scored), layers=layers))
        scenes.append(
            Scene(
                id=test.ids(i),
                name=test.rows[i].name,
                why=why,
                picture=image_uri(picture(pixels, test.kind).numpy(), most=SIDE),
                size=true.shape[-2:],
                panels=tuple(panels),
            )
        )
        ignored |= bool(out.any())
    classes = {data.classes[c]: hex_colour(each) for c, each in zip(scored, paint, strict=True)}
    shown = [*ERRORS.items()][: 4 if len(scored) > 1 else 3]
    return Gallery(
        scenes=tuple(scenes),
        about={
            "seed": given.seed,
            "empty": "empty" in given.chosen.values(),
            "ignored": ignored,
        },
        legends={
            "masks": classes,
            "outlines": classes,
            "errors": {name: hex_colour(colour) for name, colour in shown},
        },
        missing=given.missing,
        names=tuple(row.name for row in test.rows),
    )


def errors(found: BoolArray, true: BoolArray) -> BoolArray:
    """Say of each pixel whether it is right, too much, missed, or of another class.

    Shape: ``[C, H, W]`` twice -> ``[4, H, W]``.
    """
    much, missed = (found & ~true).any(axis=0), (true & ~found).any(axis=0)
    right = true.any(axis=0) & ~much & ~missed
    return np.stack([right, much & ~missed, missed & ~much, much & missed])


def _quality(counts: NDArray[np.int64], scored: Sequence[int]) -> str:
    """Say under a prediction how good it is, by the pixels of the truth and those found."""
    _, found, area = counts[0, list(scored)].sum(axis=0).tolist()
    if area:
        return f"IoU {percent(float(mean_jaccard(counts, scored)[0]))}\u00a0%"
    if not found:
        return "rightly nothing"
    return f"{found:,} pixel{'s' * (found != 1)} where nothing is"


def _planes(mask: NDArray[Any], scored: Sequence[int], *, multilabel: bool) -> BoolArray:
    """One plane per class that counts, ``[C, H, W]``."""
    if multilabel:
        return np.asarray(mask[list(scored)] == 1)
    return np.stack([mask == c for c in scored])
