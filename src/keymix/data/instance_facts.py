# SPDX-License-Identifier: Apache-2.0
"""What is counted of instances: for the record of a data set, and for a check of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from keymix.data.findings import Report
from keymix.data.record import DataFacts
from keymix.data.sample import SPLITS, Row, Source, refuse
from keymix.data.specs import Options
from keymix.data.streams import IntArray
from keymix.errors import UserError

if TYPE_CHECKING:
    from keymix.data.check import Samples
    from keymix.data.dataset import ImageData
    from keymix.data.instances import Instances

SMALL, LARGE = 32**2, 96**2
"""Areas, pixels, below which COCO calls an instance small, and above which large."""


def facts(
    rows: Mapping[str, Sequence[Row]], seen: object, source: Source, options: Options
) -> tuple[DataFacts, list[str]]:
    """Refuse unfit annotations, or say what was left out: what the record says, and notes."""
    del seen
    found = {name: [row.target for row in some] for name, some in rows.items()}
    if not options.skip_corrupt:
        for each in (each for some in found.values() for each in some):
            refuse(each.unfit, "annotations")
    if all(each.crowd.all() for each in found["train"]):
        raise UserError(
            f"none of the {len(found['train']):,} training images ({rows['train'][0].id}, ...) has "
            "an instance that is no crowd, so nothing can be learned. Name other data."
        )
    unfit = {name: sum(len(each.unfit) for each in some) for name, some in found.items()}
    notes = []
    if source.loose:
        notes.append(f"entries that belong to no image left out: {len(source.loose):,}")
    if any(unfit.values()):
        of = ", ".join(f"{number:,} of {name}" for name, number in unfit.items())
        notes.append(f"unfit annotations left out: {of}; what they mark counts as background")
    if empty := sum(not len(each) for some in found.values() for each in some):
        notes.append(f"{empty:,} images have no instances")
    return replace(source.facts, annotations_left_out=sum(unfit.values()) or None), notes


def describe(report: Report, samples: Samples, about: Source | ImageData) -> dict[str, IntArray]:
    """Report instances by split, class and size, and unfit annotations; count those of no crowd."""
    found: dict[str, list[Instances]] = {name: [] for name in SPLITS if name in samples.split}
    unfit: list[dict[str, str]] = []
    for k, split in enumerate(samples.split.tolist()):
        found[split].append(samples.row(k).target)
        unfit += [
            {**samples.item(k), "id": fault.culprit, "reason": fault.message}
            for fault in found[split][-1].unfit
        ]
    is_source = isinstance(about, Source)  # else they are left out
    if is_source:
        report.add("unusable", unfit)
    classes, items = samples.classes, samples.kind.nouns
    every = [each for some in found.values() for each in some]
    counts = {
        name: sum(
            (np.bincount(each.labels[~each.crowd], minlength=len(classes)) for each in some),
            np.zeros(len(classes), dtype=np.int64),
        )
        for name, some in found.items()
    }
    report.facts["classes"] = {
        name: {of: int(counts[of][c]) for of in found} for c, name in enumerate(classes)
    }
    instances = {name: sum(map(len, some)) for name, some in found.items()}
    without = {name: sum(not len(each) for each in some) for name, some in found.items()}
    crowds = sum(int(each.crowd.sum()) for each in every)
    areas = np.concatenate([each.areas[~each.crowd] for each in every])
    shares = {
        "small": float((areas < SMALL).mean()) if areas.size else 0.0,
        "large": float((areas > LARGE).mean()) if areas.size else 0.0,
    }
    report.facts["instances"] = {
        **instances,
        "crowds": crowds,
        "images_without": without,
        "unfit": len(unfit),
        "sizes": shares,
    }
    fewest, most = int(counts["train"].argmin()), int(counts["train"].argmax())
    report.lines += [
        ("instances", f"{_listed(instances)}; of these crowds {crowds:,}"),
        ("empty", f"{_listed(without)} {items} without instances"),
        (
            "classes",
            f"{len(classes)}; fewest instances {classes[fewest]} "
            f"({counts['train'][fewest]:,}), most {classes[most]} ({counts['train'][most]:,})",
        ),
        (
            "areas",
            f"{shares['small']:.0%} small (below 32x32 pixels), {shares['large']:.0%} large "
            "(above 96x96)",
        ),
    ]
    if unfit:
        images = len({each["id"] for each in unfit})
        text = f"{len(unfit):,} annotations of {images:,} {items}; "
        text += "--data.skip_corrupt true leaves them out and keeps images that are fit"
        report.lines.append(("unfit", text))
    if all(each.crowd.all() for each in found["train"]):
        report.add("unfit", ["no training image has an instance that is no crowd; annotate some"])
    return {} if unfit and is_source else counts  # a class may be of what is unfit


def _listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in numbers.items())
