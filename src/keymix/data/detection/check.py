# SPDX-License-Identifier: Apache-2.0
"""What a check sees of images with instances, and how many there are of each class and size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from keymix.data.dataset import ImageData
from keymix.data.detection.table import LARGE, SMALL, InstanceTable, InstanceTargets
from keymix.data.findings import Report
from keymix.data.looks import SPLITS, Look, Samples, look_at_images
from keymix.data.sources.base import Source, Table
from keymix.data.specs import Options
from keymix.data.streams import IntArray


def look_at_instances(
    table: Table, rows: range, source: Source, options: Options
) -> Iterator[Look]:
    """Decode some images, and list what is wrong with their entries and annotations."""
    assert isinstance(table, InstanceTable)
    for i, look in zip(rows, look_at_images(table, rows, source, options), strict=True):
        unlike = [] if look.faults else table.unlike(i, look.size[::-1])
        look.faults = [*look.faults, *table.unfit(i), *unlike]
        yield look


def describe(report: Report, samples: Samples, about: Source | ImageData) -> dict[str, IntArray]:
    """Report instances by split, class and size, and unfit annotations; count those of no crowd."""
    del about
    every = [each for each in samples.targets if isinstance(each, InstanceTargets)]
    count = np.concatenate([each.annotations.counts for each in every])
    split = np.repeat(samples.split, count)
    labels, areas, crowd = (
        np.concatenate([each.annotations.joined(name) for each in every])
        for name in ("labels", "areas", "crowd")
    )
    counts = samples.count(np.where(crowd, -1, labels), split)
    names = [name for name in SPLITS if name in samples.split]
    none = np.zeros(len(samples.classes), dtype=np.int64)
    counts = {name: counts.get(name, none) for name in names}
    report.facts["classes"] = {
        name: {of: int(counts[of][c]) for of in names} for c, name in enumerate(samples.classes)
    }
    instances = {name: int((split == name).sum()) for name in names}
    without = {name: int((count[samples.split == name] == 0).sum()) for name in names}
    unfit = [
        len(table.unfit(i))
        for table in samples.tables.values()
        if isinstance(table, InstanceTable)
        for i in range(len(table))
    ]
    own = areas[~crowd]
    shares = {
        "small": float((own < SMALL).mean()) if own.size else 0.0,
        "large": float((own > LARGE).mean()) if own.size else 0.0,
    }
    report.facts["instances"] = {
        **instances,
        "crowds": int(crowd.sum()),
        "images_without": without,
        "unfit": sum(unfit),
        "sizes": shares,
    }
    fewest, most = int(counts["train"].argmin()), int(counts["train"].argmax())
    report.lines += [
        ("instances", f"{_listed(instances)}; of these crowds {int(crowd.sum()):,}"),
        ("empty", f"{_listed(without)} {samples.kind.nouns} without instances"),
        (
            "classes",
            f"{len(none)}; fewest instances {samples.classes[fewest]} "
            f"({counts['train'][fewest]:,}), most {samples.classes[most]} "
            f"({counts['train'][most]:,})",
        ),
        (
            "areas",
            f"{shares['small']:.0%} small (below 32x32 pixels), {shares['large']:.0%} large "
            "(above 96x96)",
        ),
    ]
    if sum(unfit):
        images = sum(number > 0 for number in unfit)
        text = f"{sum(unfit):,} annotations of {images:,} {samples.kind.nouns}; "
        text += "--data.skip_corrupt true leaves them out and keeps images that are fit"
        report.lines.append(("unfit", text))
    if crowd[split == "train"].all():
        report.add("nothing", ["no training image has an instance that is no crowd; annotate some"])
    return counts


def _listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in numbers.items())
