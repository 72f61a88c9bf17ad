# SPDX-License-Identifier: Apache-2.0
"""Predicted masks in pictures: the same few test images with the truth and every prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keymix.analysis.mask_pictures import colours_of
from keymix.analysis.overlap import mean_jaccard, overlap_counts
from keymix.data.kinds import IGNORE
from keymix.report.formats import percent
from keymix.report.gallery import Gallery, Panel, Scene
from keymix.report.part import ImageOutputs
from keymix.report.pictures import hex_colour, image_uri, layer_uri

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

BoolArray = NDArray[np.bool_]

SIDE = 224
"""Most pixels per side of a picture."""


def draw(data: ImageData, given: ImageOutputs) -> Gallery:
    """Draw what each mixer's logits find on some test images, next to the truth."""
    from keymix.tasks.segmentation.scoring import predicted_masks

    record = data.record()
    multilabel, scored = bool(record.multilabel), record.scored_classes
    truth = np.stack([data.test.mask(i).numpy() for i in given.chosen])
    truths = _planes(truth, scored, multilabel=multilabel)
    areas = truths.reshape(len(truths), -1).sum(axis=1)
    ignored = (truth == IGNORE).reshape(len(truth), -1, *truth.shape[-2:]).any(1)
    paint = colours_of(len(scored))
    panels = [
        [Panel(text="", layer=layer_uri(planes, paint, grey=grey, most=SIDE))]
        for planes, grey in zip(truths, ignored, strict=True)
    ]
    for label, logits in given.outputs.items():
        found = predicted_masks(logits.float(), multilabel=multilabel).numpy()
        counts = overlap_counts(found, truth, num_classes=len(data.classes), multilabel=multilabel)
        shares, pixels = mean_jaccard(counts, scored), counts[:, list(scored), 1].sum(axis=1)
        drawn = _planes(found, scored, multilabel=multilabel)
        for at, planes in enumerate(drawn):
            text = _quality(int(areas[at]), float(shares[at]), int(pixels[at]))
            layer = layer_uri(planes, paint, outlines=truths[at], most=SIDE)
            panels[at].append(Panel(mixers={label: ""}, text=text, layer=layer))
    cases = [data.test.rows[i].group for i, area in zip(given.chosen, areas, strict=True) if area]
    return Gallery(
        scenes=tuple(
            Scene(
                id=data.test.ids(i),
                name=data.test.rows[i].name,
                picture=image_uri(data.test.picture(i).numpy(), most=SIDE),
                size=data.image_size,
                panels=tuple(panels[at]),
            )
            for at, i in enumerate(given.chosen)
        ),
        about={
            "seed": given.seed,
            "distinct": len({*cases}) == len(cases),  # no two are of one case
            "empty": not areas.all(),
            "ignored": bool(ignored.any()),
        },
        legend={
            data.classes[c]: hex_colour(colour) for c, colour in zip(scored, paint, strict=True)
        },
        missing=given.missing,
        names=tuple(row.name for row in data.test.rows),
    )


def _quality(area: int, share: float, found: int) -> str:
    """Say under a prediction how good it is, by the pixels of the truth and those found."""
    if area:
        return f"IoU {percent(share)}\u00a0%"
    if not found:
        return "rightly nothing"
    return f"{found:,} pixel{'s' * (found != 1)} where nothing is"


def _planes(masks: NDArray[Any], scored: Sequence[int], *, multilabel: bool) -> BoolArray:
    """One plane per class that counts, ``[B, C, H, W]``."""
    if multilabel:
        return np.asarray(masks[:, list(scored)] == 1)
    return np.stack([masks == c for c in scored], axis=1)
