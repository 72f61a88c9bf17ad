# SPDX-License-Identifier: Apache-2.0
"""What the trained models see, in pictures: attention maps, collapse, and a few predicted masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keymix.analysis.mask_pictures import colours_of
from keymix.analysis.overlap import mean_jaccard, overlap_counts
from keymix.compare import gather, maps
from keymix.compare.executor import FAILURES
from keymix.compare.mask_answers import MaskAnswers, spread_over_cases, telling
from keymix.compare.plan import Plan
from keymix.compare.runs import Finished, Reading
from keymix.compare.worker import reason
from keymix.data.tasks import IGNORE
from keymix.report.mask_layers import layer_uri
from keymix.report.pictures import image_uri
from keymix.report.record import Gallery, GallerySlice, LegendEntry, PredictedMask

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from keymix.data.dataset import ImageData
    from keymix.data.segmentation.table import ScanTable

PICTURES = 6
SIDE = 224
"""At most so many pixels a side has a picture."""


def pictures(plan: Plan, runs: Sequence[Reading], data: ImageData) -> gather.Pictures:
    """Look into every mixer's model of one seed, last epoch.

    Args:
        plan: The comparison.
        runs: Its runs as they were read.
        data: Its images.
    """
    seed, models = gather.trained_models(plan, runs)
    found = (reading.answers for reading in runs if isinstance(reading, Finished))
    answers = next((each for each in found if isinstance(each, MaskAnswers)), None)
    chosen = None if answers is None else spread_over_cases(answers, maps.PICTURES)
    return gather.Pictures(
        attention=maps.attention(models, data, pooling=plan.pooling, seed=seed, chosen=chosen),
        collapse=maps.collapse(models, data, seed=seed),
        gallery=None if answers is None else gallery(models, data, answers, seed=seed),
    )


def gallery(
    models: Mapping[str, nn.Module], data: ImageData, answers: MaskAnswers, *, seed: int
) -> Gallery:
    """Draw what every mixer's model finds on the same few test images, beside the truth.

    Args:
        models: Label to trained model.
        data: The images and masks.
        answers: Of any run, for the choice of images, which rests on what is true alone.
        seed: Whose weights they are, for the record.
    """
    import torch

    from keymix.tasks.segmentation.scoring import predicted_masks

    scans, multilabel, scored = _scans(data), _multilabel(data), answers.scored
    chosen = telling(answers, PICTURES)
    images = maps.normalised(data, data.test, chosen)
    truth = np.stack([data.test.mask(i).numpy() for i in chosen])
    truths = _planes(truth, scored, multilabel=multilabel)
    ignored = (truth == IGNORE).reshape(len(truth), -1, *truth.shape[-2:]).any(1)
    paint = colours_of(len(scored))
    predictions: dict[str, tuple[PredictedMask, ...]] = {}
    missing: dict[str, str] = {}
    for label, model in models.items():
        try:
            with torch.inference_mode():
                logits: Tensor = model.eval()(images).float()
        except FAILURES as error:
            missing[label] = reason(error)
            continue
        found = predicted_masks(logits, multilabel=multilabel).numpy()
        counts = overlap_counts(found, truth, num_classes=len(data.classes), multilabel=multilabel)
        predictions[label] = tuple(
            PredictedMask(
                png=layer_uri(planes, paint, outlines=true, most=SIDE),
                jaccard=round(float(share), 6),
                found=int(pixels[list(scored), 1].sum()),
            )
            for planes, true, share, pixels in zip(
                _planes(found, scored, multilabel=multilabel),
                truths,
                mean_jaccard(counts, scored),
                counts,
                strict=True,
            )
        )
    return Gallery(
        seed=seed,
        size=data.image_size,
        legend=tuple(
            LegendEntry(name=data.classes[c], colour="#{:02x}{:02x}{:02x}".format(*colour))
            for c, colour in zip(scored, paint, strict=True)
        ),
        ignored=bool(ignored.any()),
        slices=tuple(
            GallerySlice(
                id=scans.scan_id(i),
                case=scans.groups[i],
                png=image_uri(data.test.picture(i).numpy(), most=SIDE),
                truth=layer_uri(truths[at], paint, grey=ignored[at], most=SIDE),
                area=int(truths[at].sum()),
            )
            for at, i in enumerate(chosen)
        ),
        predictions=predictions,
        missing=missing,
        names=tuple(scans.scan_id(i) for i in range(len(data.test))),
    )


def _scans(data: ImageData) -> ScanTable:
    if data.test.scans is None:
        raise ValueError(f"the data {data.spec!r} has no masks")
    return data.test.scans


def _multilabel(data: ImageData) -> bool:
    return data.masks is not None and data.masks.multilabel


def _planes(masks: NDArray[Any], scored: Sequence[int], *, multilabel: bool) -> NDArray[np.bool_]:
    """One plane a class that counts, ``[B, C, H, W]``."""
    if multilabel:
        return np.asarray(masks[:, list(scored)] == 1)
    return np.stack([masks == c for c in scored], axis=1)
